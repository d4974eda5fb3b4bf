-- ---------------------------------------------------------------------------------------------------------- a queue's state

local QUEUE = '<I8I8I4I8I8I8I8I8I8I8I8I8I8I8I4I1I8I8I8I8I8I8'
local CONFIG = '<I1I1I8I8I4I8I1I1I8'
-- Its length in the first version of the library, which had no version of the record at the end.
local FIRST_CONFIG = 32
local CHUNK = '<c8I2I2I4I8I8I1I2'
local LEASE = '<I8c8I8I8I1'
local ENTRY = '<c8I2I4I8I8I1I8I2'
local RETRY = '<I2I2c1I8I8'
local PLACE = '<I8I2'

local function write_config(q)
    redis.call('HSET', q.key, 'c', struct.pack(CONFIG, q.ordered and 1 or 0, q.once and 1 or 0, q.retry_min, q.retry_max,
        q.max_attempts, q.retention, q.retain and 1 or 0, q.detached and 1 or 0, q.version))
end

local function read_config(q, text)
    if #text == FIRST_CONFIG then text = text .. ZERO end
    local ordered, once, retain, detached
    ordered, once, q.retry_min, q.retry_max, q.max_attempts, q.retention, retain, detached, q.version =
        struct.unpack(CONFIG, text)
    q.ordered, q.once, q.retain, q.detached = ordered == 1, once == 1, retain == 1, detached == 1
end

local function read_state(q, text)
    q.next_seq, q.cur, q.skip, q.lease, q.barrier, q.floor, q.unacked, q.bytes, q.stored, q.out, q.total, q.op, q.due,
        q.told, q.waiting, q.redelivered, q.holes, q.masked, q.pinned, q.trim, q.last, q.used =
        struct.unpack(QUEUE, text)
end

-- The queue that a call works on, one at a time. Its table is used again and again: making one of this size would cost more than
-- the rest of opening a queue.
local current = {
    key = '', node = '', seen = 0, now = 0, wakes = 0, expired = 0, dead = false, available = false,
    ordered = false, once = false, retry_min = 0, retry_max = 0, max_attempts = 0, retention = 0, retain = false,
    detached = false, version = 0,
    next_seq = 1, cur = 1, skip = 0, lease = 0, barrier = 0, floor = 0, unacked = 0, bytes = 0, stored = 0, out = 0,
    total = 0, op = 0, due = INFINITE, told = INFINITE, waiting = 0, redelivered = 0, holes = 0, masked = 0, pinned = 0,
    trim = 0, last = 0, used = 0,
    chunks = {}, retries = {}, keys = {}, same = {}, ended = {}, remote = {}, owners = {},
    to_front = {}, to_back = {}, to_free = {}, to_owned = {}, to_park = {},
}
-- What of it is filled by a call.
local FILLED = { 'chunks', 'retries', 'keys', 'same', 'ended', 'remote', 'owners', 'to_front', 'to_back', 'to_free', 'to_owned',
    'to_park' }

-- Makes room for a queue whose configuration and state are read next.
local function begin_queue(key, node, seen)
    local q = current
    q.key, q.node, q.seen = key, node, seen
    q.wakes, q.expired, q.dead, q.available = 0, 0, false, false
    for at = 1, #FILLED do
        local name = FILLED[at]
        if next(q[name]) then q[name] = {} end
    end
    return q
end

-- A queue that is new.
local function fresh_queue(key, node)
    local q = begin_queue(key, node, 0)
    q.detached, q.version = false, 0
    q.next_seq, q.cur, q.skip, q.barrier, q.floor, q.unacked, q.bytes, q.stored, q.out = 1, 1, 0, 0, 0, 0, 0, 0, 0
    q.total, q.op, q.due, q.told, q.waiting, q.redelivered = 0, 0, INFINITE, INFINITE, 0, 0
    q.holes, q.masked, q.pinned, q.trim = 0, 0, 0, 0
    return q
end

local function pack_state(q)
    return struct.pack(QUEUE, q.next_seq, q.cur, q.skip, q.lease, q.barrier, q.floor, q.unacked, q.bytes, q.stored, q.out,
        q.total, q.op, q.due, q.told, q.waiting, q.redelivered, q.holes, q.masked, q.pinned, q.trim, q.last, q.used)
end

-- Reads the queue named by `key`. Answers nil and an error when there is none or its form is not ours. `now` is the time
-- where the caller knows it.
local function open_at(key, header, now)
    local set_ms, node, seen = struct.unpack('<i8c4I8', header)
    local stored = redis.call('HMGET', key, 'v', 'c', 's')
    if not stored[3] then return nil, redis.error_reply('LLGONE no such queue') end
    if stored[1] ~= FORMAT then return nil, redis.error_reply('LLFORMAT stored format ' .. stored[1]) end
    local q = begin_queue(key, node, seen)
    read_config(q, stored[2])
    if q.version == INFINITE then return nil, redis.error_reply('LLGONE the queue is closed') end
    read_state(q, stored[3])
    q.now = now and max(now, q.last) or clock(set_ms, q.last)
    q.last = q.now
    if q.pinned > PINNED and q.now >= q.pinned - PINNED then q.pinned = 0 end
    return q
end

-- ---- chunks that were looked at

local function first_deadline(leases)
    local deadline = leases[1] and leases[1].deadline or INFINITE
    for at = 2, #leases do deadline = min(deadline, leases[at].deadline) end
    return deadline
end

local function read_chunk(text)
    local payload, n, unacked, bytes, ms, id, flags, length, at = struct.unpack(CHUNK, text)
    local keys = length > 0 and sub(text, at, at + length - 1) or ''
    at = at + length
    local leases, size = {}, #text
    while at <= size do
        local number, session, from, deadline, redelivered, set
        local start = at
        number, session, from, deadline, redelivered, at = struct.unpack(LEASE, text, at)
        set, at = unpack_set(text, at)
        leases[#leases + 1] = { lease = number, session = session, at = from, deadline = deadline,
            redelivered = redelivered == 1, set = set, text = sub(text, start, at - 1), whole = set }
    end
    return { payload = payload, n = n, unacked = unacked, bytes = bytes, ms = ms, id = id, flags = flags, keys = keys,
        leases = leases, dirty = false, fresh = false, touched = false, noted = first_deadline(leases) }
end

local function pack_chunk(chunk)
    local head = struct.pack(CHUNK, chunk.payload, chunk.n, chunk.unacked, chunk.bytes, chunk.ms, chunk.id, chunk.flags,
        #chunk.keys)
    local parts = {}
    for at, lease in ipairs(chunk.leases) do
        -- What was read and is whole still is written as it was.
        parts[at] = lease.text and lease.set == lease.whole and lease.text
            or struct.pack(LEASE, lease.lease, lease.session, lease.at, lease.deadline, lease.redelivered and 1 or 0)
                .. pack_set(lease.set)
    end
    -- The keys may be long, and `concat` would copy them with every part.
    return head .. chunk.keys .. concat(parts)
end

local function get_chunk(q, c)
    local chunk = q.chunks[c]
    if chunk == nil then
        local text = redis.call('HGET', q.key .. ':ch', c)
        chunk = text and read_chunk(text) or false
        q.chunks[c] = chunk
    end
    return chunk or nil
end

local function load_chunks(q, list)
    local missing = {}
    for _, c in ipairs(list) do
        if q.chunks[c] == nil then
            missing[#missing + 1] = c
            q.chunks[c] = false
        end
    end
    for from = 1, #missing, 1000 do
        local last = min(from + 999, #missing)
        local texts = redis.call('HMGET', q.key .. ':ch', unpack(missing, from, last))
        for at, text in ipairs(texts) do
            if text then q.chunks[missing[from + at - 1]] = read_chunk(text) end
        end
    end
end

-- Reads one entry of the index.
local function read_entry(row)
    local text = row[2][2]
    local payload, n, bytes, ms, id, flags, before, length, at = struct.unpack(ENTRY, text)
    -- The id is the sequence and '-0'.
    return { c = tonumber(sub(row[1], 1, -3)), payload = payload, n = n, bytes = bytes, ms = ms, id = id, flags = flags,
        before = before, keys = length > 0 and sub(text, at, at + length - 1) or '' }
end

local function write_entry(q, c, e)
    redis.call('XADD', q.key .. ':cx', c .. '-0', 'd',
        struct.pack(ENTRY, e.payload, e.n, e.bytes, e.ms, e.id, e.flags, e.before, #e.keys) .. e.keys)
end

local function chunk_of(e)
    return { payload = e.payload, n = e.n, unacked = e.n, bytes = e.bytes, ms = e.ms, id = e.id, flags = e.flags, keys = e.keys,
        leases = {}, dirty = false, fresh = true, touched = false, noted = INFINITE }
end

local function payload_key(q, payload)
    return q.key .. ':p:' .. hex(payload)
end

-- The ordering key hash of a message, nil without one.
local function key_of(q, chunk, index)
    if not q.ordered or chunk.keys == '' then return nil end
    local key = #chunk.keys == 8 and chunk.keys or sub(chunk.keys, index * 8 + 1, index * 8 + 8)
    if key == ZERO then return nil end
    return key
end

-- Bytes of a chunk that count as backlog: its share by number of messages.
local function backlog(chunk)
    return floor(chunk.bytes * chunk.unacked / chunk.n)
end

-- `count` messages of the chunk are gone for good.
local function drop(q, chunk, count)
    local before = backlog(chunk)
    chunk.unacked = chunk.unacked - count
    chunk.dirty = true
    q.unacked = q.unacked - count
    q.bytes = q.bytes - before + backlog(chunk)
end

-- ---- messages that were delivered before

local function read_retry(text)
    local failures, counted, place, aux, chunk = struct.unpack(RETRY, text)
    return { failures = failures, counted = counted, place = place, aux = aux, chunk = chunk }
end

local function get_retry(q, seq)
    local retry = q.retries[seq]
    if retry == nil then
        local text = redis.call('HGET', q.key .. ':rt', seq)
        retry = text and read_retry(text)
        q.retries[seq] = retry
    end
    return retry or nil
end

-- Reads what is known of several messages in one go.
local function load_retries(q, list)
    local missing = {}
    for _, seq in ipairs(list) do
        if q.retries[seq] == nil then missing[#missing + 1] = seq end
    end
    for from = 1, #missing, 1000 do
        local last = min(from + 999, #missing)
        local texts = redis.call('HMGET', q.key .. ':rt', unpack(missing, from, last))
        for at, text in ipairs(texts) do q.retries[missing[from + at - 1]] = text and read_retry(text) end
    end
end

local function need_retry(q, c, index)
    local retry = get_retry(q, c + index)
    if not retry then
        retry = { failures = 0, counted = 0, place = 'L', aux = 0, chunk = c }
        q.retries[c + index] = retry
    end
    retry.dirty, retry.gone = true, nil
    return retry
end

local function forget_retry(q, seq)
    q.retries[seq] = { gone = true, dirty = true }
end

local function live_retry(q, seq)
    local retry = get_retry(q, seq)
    if retry and retry.gone then return nil end
    return retry
end

local function by(q, at)
    if at < q.due then q.due = at end
end

-- Counts a set out of its lease: whoever holds it is told.
local function end_lease(q, c, lease, set)
    q.out = q.out - size_of(set)
    local note = struct.pack('<c8I8I8', lease.session, c, lease.lease) .. pack_set(set)
    local node = sub(lease.session, 1, 4)
    if node == q.node then
        q.ended[#q.ended + 1] = note
    else
        q.remote[node] = (q.remote[node] or '') .. note
    end
end

local function make_ready(q, c, index, first)
    local list = first and q.to_front or q.to_back
    list[#list + 1] = struct.pack(PLACE, c, index)
    need_retry(q, c, index).place = 'R'
    q.available = true
end

-- ---- write back

local function flush_lists(q)
    if #q.to_front > 0 then
        bulk('LPUSH', q.key .. ':rd', q.to_front)
        q.to_front = {}
    end
    if #q.to_back > 0 then
        bulk('RPUSH', q.key .. ':rd', q.to_back)
        q.to_back = {}
    end
    if #q.to_free > 0 then
        bulk('RPUSH', q.key .. ':kf', q.to_free)
        q.to_free = {}
    end
    if next(q.to_owned) then
        for session, list in pairs(q.to_owned) do
            bulk('RPUSH', q.key .. ':kw:' .. hex(session), list)
            redis.call('PEXPIRE', q.key .. ':kw:' .. hex(session), 3600000)
        end
        q.to_owned = {}
    end
    if next(q.to_park) then
        for key, list in pairs(q.to_park) do bulk('ZADD', q.key .. ':kl:' .. hex(key), list) end
        q.to_park = {}
    end
end

-- Notes that messages of entry `c` count as acknowledged: '*' for all, or a packed set; in `:gm` for good, in `:mk` until a
-- seek.
local function put_mask(q, name, c, text)
    redis.call('HSET', q.key .. name, c, text)
    q.masked = max(q.masked, c)
end

-- A finished chunk leaves the index unless its messages are kept for seeking.
local function forget_entries(q, list)
    local ids, payloads = {}, {}
    for _, e in ipairs(list) do
        ids[#ids + 1] = e.c .. '-0'
        payloads[#payloads + 1] = payload_key(q, e.payload)
        q.stored = q.stored - e.n
        q.holes = max(q.holes, e.c + e.n)
    end
    bulk('XDEL', q.key .. ':cx', ids)
    for from = 1, #payloads, 1000 do redis.call('UNLINK', unpack(payloads, from, min(from + 999, #payloads))) end
end

local function flush_chunks(q)
    if not next(q.chunks) then return end
    local put, gone, due, finished = {}, {}, {}, {}
    for c, chunk in pairs(q.chunks) do
        if chunk and chunk.dirty then
            local name = text_of(c)
            if chunk.unacked <= 0 then
                gone[#gone + 1] = name
                if not q.retain then
                    if c < q.pinned then
                        put_mask(q, ':gm', c, '*')
                    else
                        finished[#finished + 1] = { c = c, payload = chunk.payload, n = chunk.n }
                    end
                end
            else
                put[#put + 1] = name
                put[#put + 1] = pack_chunk(chunk)
                local deadline = first_deadline(chunk.leases)
                if deadline == chunk.noted then
                    -- The set of deadlines says so already.
                elseif #chunk.leases > 0 then
                    due[#due + 1] = text_of(deadline)
                    due[#due + 1] = name
                else
                    redis.call('ZREM', q.key .. ':ls', c)
                end
            end
        end
    end
    if #put > 0 then bulk('HSET', q.key .. ':ch', put) end
    if #due > 0 then bulk('ZADD', q.key .. ':ls', due) end
    if #gone > 0 then
        bulk('HDEL', q.key .. ':ch', gone)
        bulk('ZREM', q.key .. ':ls', gone)
    end
    if #finished > 0 then forget_entries(q, finished) end
    q.chunks = {}
end

local function flush_retries(q)
    if not next(q.retries) then return end
    local put, gone = {}, {}
    for seq, retry in pairs(q.retries) do
        if retry and retry.dirty then
            if retry.gone then
                gone[#gone + 1] = seq
            else
                put[#put + 1] = seq
                put[#put + 1] = struct.pack(RETRY, min(retry.failures, 65535), min(retry.counted, 65535), retry.place, retry.aux,
                    retry.chunk)
            end
        end
    end
    if #put > 0 then bulk('HSET', q.key .. ':rt', put) end
    if #gone > 0 then bulk('HDEL', q.key .. ':rt', gone) end
    q.retries = {}
end
