#!lua name=landline2
-- The function library. One file set, loaded as a whole: `library.lua` first, then the others in the order of library.rs.
--
-- Rules that hold throughout:
--   * every function touches the keys of one slot only, and takes the time from this server;
--   * a function reads what it needs, changes tables in memory, and writes everything back in `flush`, so the number of
--     commands grows with the chunks touched, not with the messages;
--   * message payloads never pass through here;
--   * numbers are doubles: everything stays below 2^53; opaque ids are strings of 8 bytes;
--   * a function of Lua has room for 200 local names, and the library is one: a part whose names the later ones don't need
--     is a block, and names what they do need before it.

local FORMAT = '1'
local INFINITE = 9007199254740991
-- A queue's pin that is larger holds all entries, until the time by which it is larger.
local PINNED = 4503599627370496
-- An acknowledgement of a redelivered message is remembered this long, because clients repeat one for up to 10 minutes.
local SETTLED_MS = 600000
-- Messages one woken session is expected to take.
local MESSAGES_PER_WAKE = 100
-- Due messages that one call handles: about 1 ms of server time.
local DUE_PER_CALL = 200
-- Moved deadlines are rounded up to this, so that extensions of one lease fall together again.
local SPAN_MS = 50
-- Lease numbers left out after data loss, more than were given since the last write that survived.
local LEASE_GAP = 1048576

-- Redis 7.0 gives a library nothing of the standard library while it is loaded, so this is filled in by the first call.
local ZERO, NONE
local floor, ceil, min, max, byte, sub, char, concat
-- Bits of a byte: how many are set, the lowest and the highest.
local POP, LOW, HIGH = {}, {}, {}
-- The two hexadecimal digits of a byte.
local HEX = {}

local function set_up()
    floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
    byte, sub, char, concat = string.byte, string.sub, string.char, table.concat
    ZERO, NONE = string.rep('\0', 8), string.rep('\255', 8)
    for value = 0, 255 do
        local rest, count, at = value, 0, 0
        while rest > 0 do
            if rest % 2 == 1 then
                count = count + 1
                LOW[value] = LOW[value] or at
                HIGH[value] = at
            end
            rest = floor(rest / 2)
            at = at + 1
        end
        POP[value] = count
        HEX[value] = string.format('%02x', value)
    end
end

-- Registers a function: `flags` says whether it writes, and whether it may where memory has run out.
local function register(name, callback, flag)
    redis.register_function {
        function_name = name,
        callback = function(keys, args)
            if not floor then set_up() end
            return callback(keys, args)
        end,
        flags = flag and { flag } or {},
    }
end

local function bulk(command, key, list)
    local count, at = #list, 1
    while at <= count do
        local last = min(at + 999, count)
        redis.call(command, key, unpack(list, at, last))
        at = last + 1
    end
end

-- Of 4 or 8 bytes.
local function hex(text)
    local a, b, c, d, e, f, g, h = byte(text, 1, 8)
    local head = HEX[a] .. HEX[b] .. HEX[c] .. HEX[d]
    return e and head .. HEX[e] .. HEX[f] .. HEX[g] .. HEX[h] or head
end

-- Redis writes numbers with 17 digits of precision, which takes long. Whole numbers need less.
local function text_of(number)
    return string.format('%d', number)
end

-- The time. `set` is 0, or a test's own time.
local function clock(set, last)
    if set > 0 then return max(set, last or 0) end
    local time = redis.call('TIME')
    return max(time[1] * 1000 + floor(time[2] / 1000), last or 0)
end

-- ------------------------------------------------------------------------------------------------------- sets of messages
-- A set of a chunk's messages: from index `lo` to `hi`, all of them, or those with a bit in the string `bm` (from index 0).

local function set_byte(set, at)
    if set.bm then return byte(set.bm, at + 1) or 0 end
    local first, last = at * 8, at * 8 + 7
    if last < set.lo or first > set.hi then return 0 end
    local mask = 255
    if first < set.lo then mask = bit.band(bit.lshift(mask, set.lo - first), 255) end
    if last > set.hi then mask = bit.band(mask, bit.rshift(255, last - set.hi)) end
    return mask
end

local function from_bytes(bytes, last)
    local count, lo, hi = 0, nil, nil
    for at = 0, last do
        local value = bytes[at] or 0
        if value > 0 then
            count = count + POP[value]
            lo = lo or at * 8 + LOW[value]
            hi = at * 8 + HIGH[value]
        end
    end
    if count == 0 then return nil end
    local bm
    if count ~= hi - lo + 1 then
        local text = {}
        for at = 0, floor(hi / 8) do text[at + 1] = char(bytes[at] or 0) end
        bm = concat(text)
    end
    return { lo = lo, hi = hi, bm = bm, count = count }
end

-- Answers what of `a` is also in `b`, and what is not; nil stands for nothing.
local function split(a, b)
    if b.lo > a.hi or b.hi < a.lo then return nil, a end
    if a.lo == b.lo and a.hi == b.hi and a.bm == b.bm then return a, nil end
    if not b.bm and b.lo <= a.lo and b.hi >= a.hi then return a, nil end
    local both, rest = {}, {}
    local last = floor(a.hi / 8)
    for at = floor(a.lo / 8), last do
        local x, y = set_byte(a, at), set_byte(b, at)
        local z = bit.band(x, y)
        both[at] = z
        rest[at] = x - z
    end
    return from_bytes(both, last), from_bytes(rest, last)
end

local function join(a, b)
    local bytes, last = {}, floor(max(a.hi, b.hi) / 8)
    for at = 0, last do bytes[at] = bit.bor(set_byte(a, at), set_byte(b, at)) end
    return from_bytes(bytes, last)
end

local function from_marks(marks, lo, hi)
    local bytes = {}
    for index in pairs(marks) do
        local at = floor(index / 8)
        bytes[at] = (bytes[at] or 0) + 2 ^ (index % 8)
    end
    return from_bytes(bytes, floor(hi / 8))
end

local function each(set, visit)
    if not set.bm then
        for index = set.lo, set.hi do visit(index) end
        return
    end
    for at = floor(set.lo / 8), floor(set.hi / 8) do
        local value, index = byte(set.bm, at + 1) or 0, at * 8
        while value > 0 do
            if value % 2 == 1 then visit(index) end
            value = floor(value / 2)
            index = index + 1
        end
    end
end

local function has(set, index)
    if index < set.lo or index > set.hi then return false end
    if not set.bm then return true end
    return floor((byte(set.bm, floor(index / 8) + 1) or 0) / 2 ^ (index % 8)) % 2 == 1
end

local function pack_set(set)
    local bm = set.bm
    if not bm then return struct.pack('<I2I2I2', set.lo, set.hi, 0) end
    return struct.pack('<I2I2I2', set.lo, set.hi, #bm) .. bm
end

local function unpack_set(text, at)
    local lo, hi, length, next = struct.unpack('<I2I2I2', text, at)
    local set = { lo = lo, hi = hi, count = hi - lo + 1, bm = nil }
    if length > 0 then
        set.bm = sub(text, next, next + length - 1)
        set.count = 0
        for k = 1, length do set.count = set.count + POP[byte(set.bm, k)] end
    end
    return set, next + length
end
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
    chunks = {}, retries = {}, keys = {}, ended = {}, remote = {}, owners = {},
    to_front = {}, to_back = {}, to_free = {}, to_owned = {}, to_park = {},
}
-- What of it is filled by a call.
local FILLED = { 'chunks', 'retries', 'keys', 'ended', 'remote', 'owners', 'to_front', 'to_back', 'to_free', 'to_owned', 'to_park' }

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

local function read_chunk(text)
    local payload, n, unacked, bytes, ms, id, flags, length, at = struct.unpack(CHUNK, text)
    local keys = length > 0 and sub(text, at, at + length - 1) or ''
    at = at + length
    local leases, size = {}, #text
    while at <= size do
        local number, session, from, deadline, redelivered, set
        number, session, from, deadline, redelivered, at = struct.unpack(LEASE, text, at)
        set, at = unpack_set(text, at)
        leases[#leases + 1] = { lease = number, session = session, at = from, deadline = deadline,
            redelivered = redelivered == 1, set = set }
    end
    return { payload = payload, n = n, unacked = unacked, bytes = bytes, ms = ms, id = id, flags = flags, keys = keys,
        leases = leases, dirty = false, fresh = false, touched = false }
end

local function pack_chunk(chunk)
    local head = struct.pack(CHUNK, chunk.payload, chunk.n, chunk.unacked, chunk.bytes, chunk.ms, chunk.id, chunk.flags,
        #chunk.keys)
    local parts = { head, chunk.keys }
    for at, lease in ipairs(chunk.leases) do
        parts[at + 2] = struct.pack(LEASE, lease.lease, lease.session, lease.at, lease.deadline, lease.redelivered and 1 or 0)
            .. pack_set(lease.set)
    end
    return concat(parts)
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
        leases = {}, dirty = false, fresh = true, touched = false }
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

local function get_retry(q, seq)
    local retry = q.retries[seq]
    if retry == nil then
        local text = redis.call('HGET', q.key .. ':rt', seq)
        retry = false
        if text then
            retry = {}
            retry.failures, retry.counted, retry.place, retry.aux, retry.chunk = struct.unpack(RETRY, text)
        end
        q.retries[seq] = retry
    end
    return retry or nil
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
    q.out = q.out - set.count
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

local function first_deadline(chunk)
    local leases = chunk.leases
    local deadline = leases[1] and leases[1].deadline or INFINITE
    for at = 2, #leases do deadline = min(deadline, leases[at].deadline) end
    return deadline
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
                        redis.call('HSET', q.key .. ':gm', c, '*')
                        q.masked = max(q.masked, c)
                    else
                        finished[#finished + 1] = { c = c, payload = chunk.payload, n = chunk.n }
                    end
                end
            else
                put[#put + 1] = name
                put[#put + 1] = pack_chunk(chunk)
                if #chunk.leases > 0 then
                    due[#due + 1] = text_of(first_deadline(chunk))
                    due[#due + 1] = name
                elseif not chunk.fresh then
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
-- --------------------------------------------------------------------------------------------------------- ordering keys
-- A key with a message outstanding belongs to the session that has it; what the cursor meets of a key it can't give is
-- parked in the key's line. A failed delivery brings the key's later outstanding messages back behind the failed one.

local KEY = '<c8I8c8I4I4'
-- Redis keeps a hash of short values as a list, which it searches from its beginning. Values of this length make it a table.
local KEY_BYTES = 65

-- `out` names the chunks with outstanding messages of the key: sequence, count, sequence, count and so on, ascending.
local function fresh_key()
    return { owner = ZERO, blocked = 0, offered = NONE, line = 0, out = {}, count = 0, stored = false, dirty = false }
end

local function read_key(text)
    local owner, blocked, offered, line, n, at = struct.unpack(KEY, text)
    local out, count = {}, 0
    for i = 1, n * 2, 2 do
        out[i], out[i + 1], at = struct.unpack('<I8I4', text, at)
        count = count + out[i + 1]
    end
    return { owner = owner, blocked = blocked, offered = offered, line = line, out = out, count = count, stored = true,
        dirty = false }
end

local function get_key(q, k)
    local key = q.keys[k]
    if key then return key end
    local text = redis.call('HGET', q.key .. ':ky', k)
    key = text and read_key(text) or fresh_key()
    q.keys[k] = key
    return key
end

-- Reads the keys of a chunk's messages `lo` to `hi` in one go.
local function load_keys(q, chunk, lo, hi)
    local keys, missing = q.keys, {}
    if #chunk.keys == 8 then
        get_key(q, chunk.keys)
        return
    end
    local seen, list = {}, 0
    for at = lo * 8 + 1, hi * 8 + 1, 8 do
        local k = sub(chunk.keys, at, at + 7)
        if not keys[k] and not seen[k] and k ~= ZERO then
            seen[k] = true
            list = list + 1
            missing[list] = k
        end
    end
    for from = 1, list, 1000 do
        local last = min(from + 999, list)
        local texts = redis.call('HMGET', q.key .. ':ky', unpack(missing, from, last))
        for at, text in ipairs(texts) do keys[missing[from + at - 1]] = text and read_key(text) or fresh_key() end
    end
end

local function pack_key(key)
    local out = key.out
    local text = struct.pack(KEY, key.owner, key.blocked, key.offered, key.line, #out / 2)
    if #out == 2 then
        text = text .. struct.pack('<I8I4', out[1], out[2])
    else
        local parts = { text }
        for at = 1, #out, 2 do parts[#parts + 1] = struct.pack('<I8I4', out[at], out[at + 1]) end
        text = concat(parts)
    end
    return #text < KEY_BYTES and text .. string.rep('\0', KEY_BYTES - #text) or text
end

local function flush_keys(q)
    if not next(q.keys) then return end
    local put, gone = {}, {}
    local at, session, c, count, text = 0, nil, nil, nil, nil
    for k, key in pairs(q.keys) do
        if key.dirty then
            if key.count == 0 and key.line == 0 then
                if key.stored then gone[#gone + 1] = k end
            else
                local out = key.out
                local simple = #out == 2 and key.line == 0 and key.blocked == 0 and key.offered == NONE
                -- Most keys of a chunk are alike.
                if not simple then
                    text, c = pack_key(key), nil
                elseif c ~= out[1] or count ~= out[2] or session ~= key.owner then
                    text, c, count, session = pack_key(key), out[1], out[2], key.owner
                end
                put[at + 1] = k
                put[at + 2] = text
                at = at + 2
            end
        end
    end
    if at > 0 then bulk('HSET', q.key .. ':ky', put) end
    if #gone > 0 then bulk('HDEL', q.key .. ':ky', gone) end
    q.keys = {}
end

-- Decides anew to whom a key's line is offered.
local function key_changed(q, k, key)
    key.dirty = true
    if key.count == 0 then
        key.owner = ZERO
        if key.line == 0 then
            if key.blocked > 0 then
                redis.call('ZREM', q.key .. ':kb', k)
                key.blocked = 0
            end
            key.offered = NONE
            return
        end
    end
    if key.line == 0 or key.blocked > 0 or key.offered == key.owner then return end
    key.offered = key.owner
    if key.owner == ZERO then
        q.to_free[#q.to_free + 1] = k
        q.available = true
    else
        local list = q.to_owned[key.owner] or {}
        list[#list + 1] = k
        q.to_owned[key.owner] = list
        q.owners[key.owner] = true
    end
end

-- `count` messages of chunk `c` go to the session.
local function key_start(key, session, c, count)
    key.dirty = true
    key.owner = session
    key.count = key.count + count
    local out = key.out
    local at = #out - 1
    while at > 0 and out[at] > c do at = at - 2 end
    if at > 0 and out[at] == c then
        out[at + 1] = out[at + 1] + count
    else
        table.insert(out, at + 2, count)
        table.insert(out, at + 2, c)
    end
end

local function key_left(key, c, count)
    key.dirty = true
    local out = key.out
    for at = 1, #out, 2 do
        if out[at] == c then
            out[at + 1] = out[at + 1] - count
            key.count = key.count - count
            if out[at + 1] == 0 then
                table.remove(out, at)
                table.remove(out, at)
            end
            return
        end
    end
end

local function key_settled(q, k, c)
    local key = get_key(q, k)
    key_left(key, c, 1)
    key_changed(q, k, key)
end

-- The same for a set of a chunk's messages.
local function keys_settled(q, c, chunk, set)
    if not q.ordered or chunk.keys == '' then return end
    if #chunk.keys == 8 then
        local key = get_key(q, chunk.keys)
        key_left(key, c, set.count)
        key_changed(q, chunk.keys, key)
        return
    end
    load_keys(q, chunk, set.lo, set.hi)
    local counts, list = {}, {}
    each(set, function(index)
        local k = sub(chunk.keys, index * 8 + 1, index * 8 + 8)
        local count = counts[k]
        if count then
            counts[k] = count + 1
        elseif k ~= ZERO then
            counts[k] = 1
            list[#list + 1] = k
        end
    end)
    for _, k in ipairs(list) do
        local key = q.keys[k]
        key_left(key, c, counts[k])
        key_changed(q, k, key)
    end
end

local function to_line(q, k, key, c, index)
    key.line = key.line + redis.call('ZADD', q.key .. ':kl:' .. hex(k), c + index, struct.pack(PLACE, c, index))
    key.dirty = true
end

-- Takes a waiting message out of its key's line.
local function leave_line(q, k, c, index)
    local key = get_key(q, k)
    key.line = key.line - redis.call('ZREM', q.key .. ':kl:' .. hex(k), struct.pack(PLACE, c, index))
    key_changed(q, k, key)
end

-- Takes every later outstanding message of the key back into the line. Those whose lease ended by `at` failed too.
local function bring_back(q, chunk, c, index, k, at, blocked_until)
    local key = get_key(q, k)
    key_left(key, c, 1)
    to_line(q, k, key, c, index)
    need_retry(q, c, index).place = 'N'
    local seq = c + index
    local list = {}
    for i = 1, #key.out, 2 do
        if key.out[i] >= c then list[#list + 1] = key.out[i] end
    end
    for _, later in ipairs(list) do
        local other = get_chunk(q, later)
        local kept = {}
        for _, lease in ipairs(other and other.leases or {}) do
            local marks, any = {}, false
            each(lease.set, function(i)
                if later + i > seq and key_of(q, other, i) == k then
                    marks[i] = true
                    any = true
                end
            end)
            local rest = lease.set
            if any then
                local taken
                taken, rest = split(lease.set, from_marks(marks, lease.set.lo, lease.set.hi))
                end_lease(q, later, lease, taken)
                other.dirty = true
                each(taken, function(i)
                    local retry = need_retry(q, later, i)
                    retry.place = 'N'
                    if lease.deadline <= at then
                        retry.failures = retry.failures + 1
                        if q.max_attempts > 0 then retry.counted = retry.counted + 1 end
                    end
                    key_left(key, later, 1)
                    to_line(q, k, key, later, i)
                end)
            end
            if rest then
                lease.set = rest
                kept[#kept + 1] = lease
            end
        end
        if other then other.leases = kept end
    end
    if blocked_until > at then
        key.blocked = blocked_until
        key.offered = NONE
        redis.call('ZADD', q.key .. ':kb', blocked_until, k)
        by(q, blocked_until)
    end
    key_changed(q, k, key)
end
-- ------------------------------------------------------------------------------------------------------ failures and time

local function backoff(q, failures)
    if q.retry_min == INFINITE then return 0 end
    local doublings = min(failures - 1, 30)
    local base = doublings > 0 and max(q.retry_min, 100) or q.retry_min
    return min(max(base * 2 ^ doublings, q.retry_min), q.retry_max)
end

-- One delivery failed at `at`; the message is out of its lease already.
local function fail(q, chunk, c, index, at, bypass)
    local retry = need_retry(q, c, index)
    retry.failures = retry.failures + 1
    local key = key_of(q, chunk, index)
    if q.max_attempts > 0 then
        retry.counted = retry.counted + 1
        if retry.counted >= q.max_attempts then
            retry.place = 'X'
            redis.call('ZADD', q.key .. ':dd', 0, struct.pack(PLACE, c, index))
            q.dead = true
            if key then key_settled(q, key, c) end
            return
        end
    end
    local wait = bypass and 0 or backoff(q, retry.failures)
    if key then
        bring_back(q, chunk, c, index, key, at, at + wait)
    elseif wait == 0 then
        make_ready(q, c, index, false)
    else
        retry.place, retry.aux = 'D', at + wait
        redis.call('ZADD', q.key .. ':dl', at + wait, struct.pack(PLACE, c, index))
        by(q, at + wait)
    end
end

-- Makes a message wait for its next delivery without delay and without counting the last one. What follows it in its key
-- comes back with it, uncounted too: no deadline has passed at time 0.
local function put_back(q, chunk, c, index, first)
    local k = key_of(q, chunk, index)
    if not k then return make_ready(q, c, index, first) end
    bring_back(q, chunk, c, index, k, 0, 0)
    q.available = true
end

-- Takes a message that waits somewhere out of there; a leased one is the caller's business.
local function withdraw(q, chunk, c, index, retry)
    local place = struct.pack(PLACE, c, index)
    if retry.place == 'D' then
        redis.call('ZREM', q.key .. ':dl', place)
    elseif retry.place == 'X' then
        redis.call('ZREM', q.key .. ':dd', place)
    elseif retry.place == 'N' then
        leave_line(q, key_of(q, chunk, index), c, index)
    end -- a stale entry of the ready list is skipped when it is met
end

local function note_due(q, c, chunk)
    if chunk and #chunk.leases > 0 then
        redis.call('ZADD', q.key .. ':ls', first_deadline(chunk), c)
    else
        redis.call('ZREM', q.key .. ':ls', c)
    end
end

local function expire_leases(q, left)
    while left > 0 do
        local due = redis.call('ZRANGEBYSCORE', q.key .. ':ls', '-inf', q.now, 'LIMIT', 0, 16)
        if #due == 0 then return left end
        for at, text in ipairs(due) do due[at] = tonumber(text) end
        load_chunks(q, due)
        for _, c in ipairs(due) do
            local chunk = get_chunk(q, c)
            local over, kept = {}, {}
            for _, lease in ipairs(chunk and chunk.leases or {}) do
                local list = lease.deadline <= q.now and over or kept
                list[#list + 1] = lease
            end
            if chunk and #over > 0 then
                chunk.leases = kept
                chunk.dirty = true
                table.sort(over, function(a, b)
                    if a.deadline ~= b.deadline then return a.deadline < b.deadline end
                    return a.set.lo < b.set.lo
                end)
                for _, lease in ipairs(over) do
                    end_lease(q, c, lease, lease.set)
                    q.expired = q.expired + lease.set.count
                end
                for _, lease in ipairs(over) do
                    each(lease.set, function(index) fail(q, chunk, c, index, lease.deadline, false) end)
                    left = left - lease.set.count
                end
            end
            note_due(q, c, chunk)
        end
    end
    return left
end

local function end_backoffs(q, left)
    local due = redis.call('ZRANGEBYSCORE', q.key .. ':dl', '-inf', q.now, 'LIMIT', 0, DUE_PER_CALL)
    for _, place in ipairs(due) do
        local c, index = struct.unpack(PLACE, place)
        local retry = live_retry(q, c + index)
        if retry and retry.place == 'D' then make_ready(q, c, index, false) end
    end
    bulk('ZREM', q.key .. ':dl', due)
    due = redis.call('ZRANGEBYSCORE', q.key .. ':kb', '-inf', q.now, 'LIMIT', 0, DUE_PER_CALL)
    bulk('ZREM', q.key .. ':kb', due)
    for _, k in ipairs(due) do
        local key = get_key(q, k)
        key.blocked = 0
        key_changed(q, k, key)
    end
end

-- Removes an entry that was looked at, wherever its messages are.
local function remove_chunk(q, c, chunk)
    for _, lease in ipairs(chunk.leases) do
        end_lease(q, c, lease, lease.set)
        each(lease.set, function(index)
            local key = key_of(q, chunk, index)
            if key then key_settled(q, key, c) end
        end)
    end
    for index = 0, chunk.n - 1 do
        local retry = live_retry(q, c + index)
        if retry then
            if retry.place ~= 'L' then withdraw(q, chunk, c, index, retry) end
            forget_retry(q, c + index)
        elseif chunk.keys ~= '' and q.ordered and c + index < q.cur + q.skip then
            local key = key_of(q, chunk, index)
            if key then leave_line(q, key, c, index) end
        end
    end
    chunk.leases = {}
    drop(q, chunk, chunk.unacked)
    redis.call('HDEL', q.key .. ':ch', c)
    redis.call('ZREM', q.key .. ':ls', c)
    q.chunks[c] = false
end

local function read_mask(text)
    if text == '*' then return { lo = 0, hi = 65534, count = 65535 } end
    return (unpack_set(text, 1))
end

-- Messages of an entry from the cursor on that count as acknowledged: for good, or since the last seek.
local function mask_of(q, c)
    if c > q.masked then return nil end
    local gone, set_aside = redis.call('HGET', q.key .. ':gm', c), redis.call('HGET', q.key .. ':mk', c)
    if not gone and not set_aside then return nil end
    if gone == '*' or set_aside == '*' then return read_mask('*') end
    if gone and set_aside then return join(read_mask(gone), read_mask(set_aside)) end
    return read_mask(gone or set_aside)
end

-- How many of an entry's messages are unacknowledged where nothing but a mask is known.
local function unmasked(e, mask)
    if not mask then return e.n end
    local gone = split({ lo = 0, hi = e.n - 1, count = e.n }, mask)
    return e.n - (gone and gone.count or 0)
end

-- The entry is forgotten: it is beyond retention, or nothing refers to it any more.
local function forget_entry(q, e)
    local chunk = get_chunk(q, e.c)
    if chunk then
        remove_chunk(q, e.c, chunk)
    elseif e.c >= q.cur then
        local unacked = unmasked(e, mask_of(q, e.c))
        drop(q, { unacked = unacked, n = e.n, bytes = e.bytes }, unacked)
    end
    if e.c == q.cur then q.skip = 0 end
    if e.c <= q.masked then
        redis.call('HDEL', q.key .. ':gm', e.c)
        redis.call('HDEL', q.key .. ':mk', e.c)
    end
    forget_entries(q, { e })
end

local function end_retention(q)
    local done = 0
    while done < DUE_PER_CALL do
        local rows = redis.call('XRANGE', q.key .. ':cx', '-', '+', 'COUNT', 16)
        for _, row in ipairs(rows) do
            local e = read_entry(row)
            local trimmed = e.c < q.trim and not get_chunk(q, e.c) and e.c >= q.pinned
            if not trimmed and e.ms + q.retention > q.now then return e end
            forget_entry(q, e)
            done = done + 1
        end
        if #rows < 16 then return nil end
    end
    q.due = q.now
    return nil
end

local function first_score(key, from)
    local first = redis.call('ZRANGEBYSCORE', key, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return first[2] and tonumber(first[2]) or INFINITE
end

-- Carries out what is due, within bounds; when there is more, the next due time is now.
local function advance(q)
    if q.seen > q.op then
        -- A node saw a later state than this: the store lost data. Leases may be lost or settled ones back, so all end.
        q.op = q.seen
        q.lease = q.lease + LEASE_GAP
        local all = redis.call('HKEYS', q.key .. ':ch')
        for _, text in ipairs(all) do
            local c = tonumber(text)
            local chunk = get_chunk(q, c)
            local leases = chunk.leases
            chunk.leases = {}
            chunk.dirty = true
            for _, lease in ipairs(leases) do
                end_lease(q, c, lease, lease.set)
                each(lease.set, function(index) put_back(q, chunk, c, index, false) end)
            end
            redis.call('ZREM', q.key .. ':ls', c)
        end
        q.due = q.now
    end
    if q.now < q.due then return end
    q.due = INFINITE
    local key = q.key
    local left = expire_leases(q, DUE_PER_CALL)
    end_backoffs(q, left)
    local head = end_retention(q)
    local freed = redis.call('ZRANGEBYSCORE', key .. ':dd', '(0', q.now, 'LIMIT', 0, DUE_PER_CALL)
    for _, place in ipairs(freed) do
        redis.call('ZADD', key .. ':dd', 0, place)
        q.dead = true
    end
    if q.once then
        local old = redis.call('ZRANGEBYSCORE', key .. ':so', '-inf', q.now - SETTLED_MS, 'LIMIT', 0, DUE_PER_CALL)
        bulk('HDEL', key .. ':sd', old)
        bulk('ZREM', key .. ':so', old)
        by(q, first_score(key .. ':so', '-inf') + SETTLED_MS)
    end
    by(q, first_score(key .. ':ls', '-inf'))
    by(q, first_score(key .. ':dl', '-inf'))
    by(q, first_score(key .. ':kb', '-inf'))
    by(q, first_score(key .. ':dd', '(0'))
    if head then by(q, head.ms + q.retention) end
    -- Every node that was told the earlier time comes by itself and learns this one.
    q.told = q.due
end

-- ---------------------------------------------------------------------------------------------------------- waking, answers

local function available(q)
    local fresh = min(max(q.next_seq - q.cur - q.skip, 0), q.unacked)
    return fresh + redis.call('LLEN', q.key .. ':rd') + redis.call('LLEN', q.key .. ':kf')
end

local function tell(node, message)
    return redis.call('PUBLISH', 'gcp.node:' .. hex(node), message)
end

-- Wakes as many waiting nodes, in turn, as there is work for.
local function offer(q)
    local count = available(q)
    if count == 0 then return end
    local units = ceil(count / MESSAGES_PER_WAKE)
    local popped = redis.call('ZPOPMIN', q.key .. ':wt', min(units, q.waiting))
    q.waiting = max(q.waiting - #popped / 2, 0)
    local each_units = ceil(units / max(#popped / 2, 1))
    local at = 1
    while at < #popped do
        if popped[at] == q.node then
            q.wakes = q.wakes + each_units
        elseif tell(popped[at], struct.pack('<c1I4I2', 'W', each_units, #q.key) .. q.key) == 0 and q.waiting > 0 then
            -- Nobody listens there any more (or it listens elsewhere in the cluster): the next one gets the turn as well.
            local next = redis.call('ZPOPMIN', q.key .. ':wt', 1)
            if next[1] then
                q.waiting = q.waiting - 1
                popped[#popped + 1] = next[1]
                popped[#popped + 1] = next[2]
            end
        end
        at = at + 2
    end
end

-- Writes everything back and answers what every queue function answers first.
local function finish(q, offering)
    flush_lists(q)
    flush_retries(q)
    flush_chunks(q)
    flush_keys(q)
    if (q.available or offering) and q.waiting > 0 and not q.detached then offer(q) end
    local due = q.due
    if due < q.told then
        if q.waiting > 0 then
            for _, node in ipairs(redis.call('ZRANGE', q.key .. ':wt', 0, -1)) do
                if node ~= q.node then tell(node, struct.pack('<c1I8I2', 'T', due, #q.key) .. q.key) end
            end
        end
        q.told = due
    end
    for node, notes in pairs(q.remote) do
        tell(node, struct.pack('<c1I2', 'E', #q.key) .. q.key .. notes)
    end
    local owners = ''
    for session in pairs(q.owners) do
        local node = sub(session, 1, 4)
        if node == q.node then
            owners = owners .. session
        else
            tell(node, struct.pack('<c1c8I2', 'S', session, #q.key) .. q.key)
        end
    end
    q.op = q.op + 1
    redis.call('HSET', q.key, 's', pack_state(q))
    local head = struct.pack('<I8I8I8I4I1I4', q.now, due, q.op, q.wakes, q.dead and 1 or 0, q.expired)
    return head, concat(q.ended), owners
end
-- ---------------------------------------------------------------------------------------------------------------- leasing
local seal_bytes, offsets, register_waiting
do -- see library.lua

-- Payloads up to so many bytes together, of so many chunks, are given along: copying more through Lua costs more than a call.
local INLINE_BYTES = 16384
local INLINE_CHUNKS = 20

-- Bytes that sealing adds to each message of a chunk: the id in decimal and the publish time.
function seal_bytes(e)
    local nanos = e.ms % 1000 * 1000000
    local length = nanos < 128 and 1 or nanos < 16384 and 2 or nanos < 2097152 and 3 or nanos < 268435456 and 4 or 5
    return 2 + #text_of(e.id) + 4 + 5 + length
end

-- End offsets of the messages `lo` to `hi`, with the end of the one before at `lo - 1`.
function offsets(q, e, lo, hi)
    local from = max(lo - 1, 0)
    local text = redis.call('GETRANGE', payload_key(q, e.payload), from * 4, hi * 4 + 3)
    local ends = { [-1] = 0 }
    if #text ~= (hi - from + 1) * 4 then return nil end
    local at = 1
    for index = from, hi do ends[index], at = struct.unpack('<I4', text, at) end
    return ends
end

local function wants(pick)
    return pick.left > 0 and (pick.count == 0 or pick.bytes < pick.max_bytes)
end

local function pick_of(pick, c, chunk)
    local part = pick.parts[c]
    if not part then
        part = { chunk = chunk, lo = 65535, hi = -1, count = 0, marks = nil, marked = false, retried = false, redelivered = '' }
        pick.parts[c] = part
        pick.order[#pick.order + 1] = c
    end
    return part
end

local function count_in(pick, count, bytes)
    pick.left = pick.left - count
    pick.count = pick.count + count
    pick.bytes = pick.bytes + bytes
end

-- Gives the messages `lo` to `hi` of a chunk that nothing else is known about.
local function give_range(pick, c, chunk, lo, hi, bytes)
    local part = pick_of(pick, c, chunk)
    if part.marks or part.count > 0 then
        part.marks = part.marks or {}
        if part.lo <= part.hi and not part.marked then
            for index = part.lo, part.hi do part.marks[index] = true end
        end
        part.marked = true
        for index = lo, hi do part.marks[index] = true end
    end
    part.lo, part.hi = min(part.lo, lo), max(part.hi, hi)
    part.count = part.count + hi - lo + 1
    count_in(pick, hi - lo + 1, bytes)
end

local function message_bytes(q, pick, chunk, index)
    if pick.max_bytes - pick.bytes > chunk.bytes then return chunk.bytes / chunk.n end
    local ends = offsets(q, chunk, index, index)
    if not ends then return 0 end
    return ends[index] - ends[index - 1] + seal_bytes(chunk)
end

local function give(q, pick, c, chunk, index)
    give_range(pick, c, chunk, index, index, message_bytes(q, pick, chunk, index))
    local retry = chunk.touched and live_retry(q, c + index)
    if retry then
        retry.place, retry.dirty = 'L', true
        local part = pick.parts[c]
        part.retried = true
        if retry.failures > 0 then
            part.redelivered = part.redelivered .. struct.pack('<I2I2I2', index, min(retry.failures, 65535), min(retry.counted, 65535))
        end
    end
end

local function lease_line(q, pick, k)
    local name = q.key .. ':kl:' .. hex(k)
    local places = redis.call('ZRANGE', name, 0, pick.left - 1)
    local taken = {}
    for _, place in ipairs(places) do
        if not wants(pick) then break end
        local c, index = struct.unpack(PLACE, place)
        local chunk = get_chunk(q, c)
        taken[#taken + 1] = place
        if chunk then
            chunk.touched = true
            key_start(get_key(q, k), pick.session, c, 1)
            give(q, pick, c, chunk, index)
        end
    end
    bulk('ZREM', name, taken)
    local key = get_key(q, k)
    key.line = key.line - #taken
end

local function lease_keys(q, pick)
    for _, owner in ipairs({ pick.session, ZERO }) do
        local name = owner == ZERO and q.key .. ':kf' or q.key .. ':kw:' .. hex(owner)
        while wants(pick) do
            local k = redis.call('LPOP', name)
            if not k then break end
            local key = get_key(q, k)
            if key.offered == owner then
                key.offered = NONE
                lease_line(q, pick, k)
                key_changed(q, k, key)
            end
        end
    end
end

local function lease_ready(q, pick, share)
    while share > 0 and wants(pick) do
        local places = redis.call('LPOP', q.key .. ':rd', min(share, pick.left, 100))
        if not places then return end
        for at, place in ipairs(places) do
            if not wants(pick) then
                -- The byte budget ended first: the rest goes back to where it was.
                for rest = #places, at, -1 do redis.call('LPUSH', q.key .. ':rd', places[rest]) end
                return
            end
            local c, index = struct.unpack(PLACE, place)
            local retry = live_retry(q, c + index)
            local chunk = retry and retry.place == 'R' and get_chunk(q, c)
            if chunk then
                chunk.touched = true
                give(q, pick, c, chunk, index)
                share = share - 1
            end
        end
    end
end

-- How many messages of the entry from `lo` on fit the budget, and their bytes.
local function fit(q, pick, e, lo)
    local count = min(pick.left, e.n - lo)
    if pick.max_bytes - pick.bytes >= e.bytes then
        return count, count == e.n and e.bytes or floor(e.bytes * count / e.n)
    end
    local ends = offsets(q, e, lo, lo + count - 1)
    if not ends then return count, 0 end
    local seal, bytes = seal_bytes(e), 0
    for given = 1, count do
        if (pick.count > 0 or given > 1) and pick.bytes + bytes >= pick.max_bytes then return given - 1, bytes end
        local index = lo + given - 1
        bytes = bytes + ends[index] - ends[index - 1] + seal
    end
    return count, bytes
end

local function park(q, k, key, c, index)
    local list = q.to_park[k] or {}
    list[#list + 1] = c + index
    list[#list + 1] = struct.pack(PLACE, c, index)
    q.to_park[k] = list
    key.line = key.line + 1
    key_changed(q, k, key)
end

-- Whether the session may have messages of the key that the cursor meets.
local function is_open(key, session)
    return key.line == 0 and key.blocked == 0 and (key.owner == session or key.owner == ZERO)
end

-- Whether the session may have this message; if its key is another's, it is parked.
local function admit(q, pick, c, chunk, index, mask)
    if mask and has(mask, index) then return false end
    local k = key_of(q, chunk, index)
    if not k then return true end
    local key = get_key(q, k)
    if is_open(key, pick.session) then
        key_start(key, pick.session, c, 1)
        return true
    end
    park(q, k, key, c, index)
    return false
end

local function lease_entry_keyed(q, pick, e, chunk, lo, mask)
    local c = e.c
    if q.ordered and e.keys ~= '' then load_keys(q, chunk, lo, min(lo + pick.left, e.n) - 1) end
    if pick.max_bytes - pick.bytes <= chunk.bytes then
        -- The byte budget may end within the entry, so that each message has to be looked up.
        for index = lo, e.n - 1 do
            if not wants(pick) then return index end
            if admit(q, pick, c, chunk, index, mask) then give(q, pick, c, chunk, index) end
        end
        return e.n
    end
    local share = chunk.bytes / chunk.n
    if not mask and q.ordered and #e.keys == 8 then
        local key = get_key(q, e.keys)
        if is_open(key, pick.session) then
            local count = min(pick.left, e.n - lo)
            key_start(key, pick.session, c, count)
            give_range(pick, c, chunk, lo, lo + count - 1, share * count)
            return lo + count
        end
    end
    local index, left, first = lo, pick.left, nil
    while index < e.n and left > 0 do
        if admit(q, pick, c, chunk, index, mask) then
            first = first or index
            left = left - 1
        elseif first then
            give_range(pick, c, chunk, first, index - 1, share * (index - first))
            first = nil
        end
        index = index + 1
    end
    if first then give_range(pick, c, chunk, first, index - 1, share * (index - first)) end
    return index
end

local function lease_entry(q, pick, e)
    local lo = q.skip
    local chunk = lo > 0 and get_chunk(q, e.c)
    local mask = mask_of(q, e.c)
    if not chunk then
        chunk = chunk_of(e)
        if mask then chunk.unacked = unmasked(e, mask) end
        q.chunks[e.c] = chunk
    end
    if chunk.unacked == 0 then
        q.chunks[e.c] = nil
        return e.n
    end
    chunk.dirty = true
    if mask or (q.ordered and e.keys ~= '') then return lease_entry_keyed(q, pick, e, chunk, lo, mask) end
    local count, bytes = fit(q, pick, e, lo)
    if count > 0 then give_range(pick, e.c, chunk, lo, lo + count - 1, bytes) end
    return lo + count
end

local function lease_fresh(q, pick)
    if not wants(pick) or q.cur >= q.next_seq then return end
    -- The first entry tells about how many the messages wanted are in: those read in vain cost as much.
    local batch, size = 1, 1
    while wants(pick) and q.cur < q.next_seq do
        local rows = redis.call('XRANGE', q.key .. ':cx', q.cur, '+', 'COUNT', batch)
        for _, row in ipairs(rows) do
            if not wants(pick) then return end
            local e = read_entry(row)
            if e.c ~= q.cur then q.cur, q.skip = e.c, 0 end
            size = e.n
            local stop = lease_entry(q, pick, e)
            if stop < e.n then
                q.skip = stop
                return
            end
            q.cur, q.skip = e.c + e.n, 0
        end
        if #rows < batch then
            if wants(pick) then q.cur, q.skip = q.next_seq, 0 end
            return
        end
        batch = min(ceil(pick.left / size), 100)
    end
end

-- Redelivered and fresh messages take turns, so that a message that fails again and again doesn't starve the rest.
local function lease_all(q, pick)
    if q.ordered then lease_keys(q, pick) end
    local ready = redis.call('LLEN', q.key .. ':rd') > 0
    if not ready then return lease_fresh(q, pick) end
    local share = pick.left
    if q.cur + q.skip < q.next_seq then
        share = q.redelivered == 0 and ceil(pick.left / 2) or floor(pick.left / 2)
        q.redelivered = q.redelivered == 0 and share > 0 and 1 or 0
    end
    lease_ready(q, pick, share)
    lease_fresh(q, pick)
    lease_ready(q, pick, pick.left)
end

local function close_part(q, pick, c, answer)
    local part = pick.parts[c]
    local chunk = part.chunk
    local set = { lo = part.lo, hi = part.hi, count = part.count }
    if part.marks then set = from_marks(part.marks, part.lo, part.hi) end
    chunk.leases[#chunk.leases + 1] = { lease = q.lease, session = pick.session, at = q.now, deadline = pick.deadline,
        redelivered = part.retried, set = set }
    chunk.dirty = true
    local from, to = 0, 0
    if set.lo > 0 or set.hi < chunk.n - 1 then
        local ends = offsets(q, chunk, set.lo, set.lo)
        local last = set.hi == set.lo and ends or offsets(q, chunk, set.hi, set.hi)
        if ends and last then from, to = ends[set.lo - 1], last[set.hi] end
    end
    answer[#answer + 1] = struct.pack('<I8c8I2I8I8I1I4I4I2', c, chunk.payload, chunk.n, chunk.ms, chunk.id, chunk.flags, from, to,
        #part.redelivered) .. pack_set(set) .. part.redelivered
    return to == 0
end

-- Adds the first payloads to the answer, while they are whole and small: that spares the node another call. Answers how many.
local function add_payloads(q, pick, wholes, answer)
    local count, room = 0, INLINE_BYTES
    for at = 1, min(wholes, INLINE_CHUNKS) do
        local chunk = pick.parts[pick.order[at]].chunk
        room = room - chunk.bytes
        local payload = room >= 0 and redis.call('GET', payload_key(q, chunk.payload))
        if not payload then break end
        answer[#answer + 1] = payload
        count = at
    end
    return count
end

function register_waiting(q)
    q.waiting = q.waiting + redis.call('ZADD', q.key .. ':wt', 'NX', q.now, q.node)
end

-- args: header, session, max messages, max bytes, deadline, max in flight, other waiting sessions of the node, '1' when this
-- session waits too if it gets nothing, version of the record that the caller acts on or 0
local function lease(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    local version = tonumber(args[9])
    if version > 0 and version < q.version then return redis.error_reply('LLSTALE record') end
    q.used = q.now
    advance(q)
    flush_lists(q)
    local answer = { '', '', '', '' }
    local others = tonumber(args[7])
    local pick = { session = args[2], max_bytes = tonumber(args[4]), deadline = q.now + tonumber(args[5]), bytes = 0, count = 0,
        parts = {}, order = {} }
    pick.left = q.detached and 0 or min(tonumber(args[3]), max(tonumber(args[6]) - q.out, 0))
    if pick.left > 1 and (others > 0 or q.waiting > 0) then
        pick.left = min(pick.left, max(ceil(available(q) / (others + q.waiting + 1)), 1))
    end
    if pick.left > 0 then lease_all(q, pick) end
    local wholes, inlined = 0, 0
    if pick.count > 0 then
        q.lease = q.lease + 1
        q.out = q.out + pick.count
        by(q, pick.deadline)
        -- Keys are picked in any order, but one key's messages must leave in theirs.
        if q.ordered then table.sort(pick.order) end
        for at, c in ipairs(pick.order) do
            if close_part(q, pick, c, answer) and wholes == at - 1 then wholes = at end
        end
        inlined = add_payloads(q, pick, wholes, answer)
    end
    if (pick.count == 0 and args[8] == '1') or others > 0 then register_waiting(q) end
    local number = q.lease
    local head, ended, owners = finish(q, pick.count > 0)
    answer[1] = head
    answer[2] = ended
    answer[3] = owners
    answer[4] = struct.pack('<I8I8I4I1I1I1', number, pick.deadline, q.max_attempts, q.once and 1 or 0, q.ordered and 1 or 0, inlined)
    return answer
end
register('landline2_lease', lease, 'allow-oom')

end
-- --------------------------------------------------------------------------------------------------------------- settling
do -- see library.lua

local function stale_outcome(q)
    return q.once and 'I' or 'D'
end

-- A group of tokens: those of one chunk, one lease and one attempt number.
local function read_group(text)
    local c, number, attempt, at = struct.unpack('<I8I8I4', text)
    return c, number, attempt, (unpack_set(text, at))
end

-- Takes what is live of `set` out of the chunk's leases of this number. Calls `done` with each lease and part; answers the
-- part of the set that was not live.
local function take(q, c, chunk, number, set, done)
    local kept = {}
    for _, lease in ipairs(chunk.leases) do
        local rest = lease.set
        if set and lease.lease == number then
            local part
            part, rest = split(lease.set, set)
            if part then
                local _, other = split(set, part)
                set = other
                chunk.dirty = true
                done(lease, part)
            end
        end
        if rest then
            lease.set = rest
            kept[#kept + 1] = lease
        end
    end
    chunk.leases = kept
    return set
end

local function remember(q, c, number, set)
    local leases, times = {}, {}
    each(set, function(index)
        leases[#leases + 1] = c + index
        leases[#leases + 1] = number
        times[#times + 1] = q.now
        times[#times + 1] = c + index
    end)
    bulk('HSET', q.key .. ':sd', leases)
    bulk('ZADD', q.key .. ':so', times)
    by(q, q.now + SETTLED_MS)
end

-- Removes a message that is not under the lease of the token that acknowledges it.
local function remove_elsewhere(q, c, chunk, index)
    local retry = live_retry(q, c + index)
    if not retry then return false end
    if retry.place == 'L' then
        local one = { lo = index, hi = index, count = 1 }
        local kept, found = {}, false
        for _, lease in ipairs(chunk.leases) do
            local part, rest = split(lease.set, one)
            if part then
                found = true
                end_lease(q, c, lease, part)
                keys_settled(q, c, chunk, part)
            end
            if rest then
                lease.set = rest
                kept[#kept + 1] = lease
            end
        end
        chunk.leases = kept
        if not found then return false end
    else
        withdraw(q, chunk, c, index, retry)
    end
    forget_retry(q, c + index)
    drop(q, chunk, 1)
    return true
end

-- Whether a message that is not under the token's lease is still there: waiting, under another lease, or fresh.
local function is_unacked(q, c, chunk, index)
    if c > q.cur or (c == q.cur and index >= q.skip) then return true end
    if not chunk then return false end
    if live_retry(q, c + index) then return true end
    for _, lease in ipairs(chunk.leases) do
        if has(lease.set, index) then return true end
    end
    local k = key_of(q, chunk, index)
    return k and redis.call('ZSCORE', q.key .. ':kl:' .. hex(k), struct.pack(PLACE, c, index)) ~= false
end

local function acknowledge_group(q, text)
    local c, number, attempt, set = read_group(text)
    if q.detached or number < q.barrier then return stale_outcome(q) end
    local chunk = get_chunk(q, c)
    local rest = set
    if chunk then
        rest = take(q, c, chunk, number, set, function(lease, part)
            end_lease(q, c, lease, part)
            keys_settled(q, c, chunk, part)
            if lease.redelivered then each(part, function(index) forget_retry(q, c + index) end) end
            if q.once and attempt > 1 then remember(q, c, number, part) end
            drop(q, chunk, part.count)
        end)
    end
    if not rest then return 'D' end
    local invalid
    each(rest, function(index)
        if not q.once then
            if chunk then remove_elsewhere(q, c, chunk, index) end
            return
        end
        local settled = false
        if not is_unacked(q, c, chunk, index) then
            local by_lease = redis.call('HGET', q.key .. ':sd', c + index)
            if by_lease then settled = tonumber(by_lease) == number else settled = attempt == 1 end
        end
        if not settled then
            invalid = invalid or {}
            invalid[index] = true
        end
    end)
    if not invalid then return 'D' end
    return 'P' .. pack_set(from_marks(invalid, rest.lo, rest.hi))
end

local function chunks_of(groups, first)
    local list = {}
    for at = first, #groups do list[#list + 1] = (struct.unpack('<I8', groups[at])) end
    return list
end

local function settle(handle, is_look)
    return function(keys, args)
        local q, err = open_at(keys[1], args[1])
        if not q then return err end
        if not is_look then q.used = q.now end
        advance(q)
        load_chunks(q, chunks_of(args, 3))
        local answer = { '', '', '' }
        for at = 3, #args do answer[#answer + 1] = handle(q, args[at], args[2]) end
        answer[1], answer[2], answer[3] = finish(q, true)
        return answer
    end
end

-- Answers the outcome of a change: 'D', or 'P' and the set for which it was too late.
local function late(q, rest, repeated)
    if not rest or not q.once or repeated then return 'D' end
    return 'P' .. pack_set(rest)
end

-- args[2]: deadline from now, bound on the lease's life
local function extend_group(q, text, options)
    local c, number, _, set = read_group(text)
    local deadline, life = struct.unpack('<I8I8', options)
    local chunk = not q.detached and get_chunk(q, c)
    if not chunk then return late(q, set) end
    local moved = {}
    local rest = take(q, c, chunk, number, set, function(lease, part)
        local at = ceil((q.now + deadline) / SPAN_MS) * SPAN_MS
        if life > 0 then at = min(at, lease.at + life) end
        by(q, at)
        moved[#moved + 1] = { lease = lease.lease, session = lease.session, at = lease.at, deadline = at,
            redelivered = lease.redelivered, set = part }
    end)
    for _, lease in ipairs(moved) do
        local merged = false
        for _, other in ipairs(chunk.leases) do
            if other.lease == lease.lease and other.deadline == lease.deadline then
                other.set = join(other.set, lease.set)
                merged = true
                break
            end
        end
        if not merged then chunk.leases[#chunk.leases + 1] = lease end
    end
    return late(q, rest)
end

-- args[2]: '1' when the retry policy's backoff is left out or '0', then '1' when the call may have been carried out before
local function nack_group(q, text, options)
    local bypass, repeated = sub(options, 1, 1) == '1', sub(options, 2, 2) == '1'
    local c, number, _, set = read_group(text)
    local chunk = not q.detached and get_chunk(q, c)
    if not chunk then return late(q, set, repeated) end
    local parts = {}
    local rest = take(q, c, chunk, number, set, function(lease, part)
        end_lease(q, c, lease, part)
        parts[#parts + 1] = part
    end)
    for _, part in ipairs(parts) do
        each(part, function(index) fail(q, chunk, c, index, q.now, bypass) end)
    end
    return late(q, rest, repeated)
end

local function release_group(q, text)
    local c, number, _, set = read_group(text)
    local chunk = not q.detached and get_chunk(q, c)
    if not chunk then return 'D' end
    local parts = {}
    take(q, c, chunk, number, set, function(lease, part)
        end_lease(q, c, lease, part)
        parts[#parts + 1] = part
    end)
    for _, part in ipairs(parts) do
        local list = {}
        each(part, function(index) list[#list + 1] = index end)
        for at = #list, 1, -1 do put_back(q, chunk, c, list[at], true) end
    end
    return 'D'
end

register('landline2_acknowledge', settle(acknowledge_group), 'allow-oom')
register('landline2_extend', settle(extend_group), 'allow-oom')
register('landline2_nack', settle(nack_group), 'allow-oom')
register('landline2_release', settle(release_group), 'allow-oom')

-- A node lost the answer of a lease call: gives back what the session got since the last lease number the node knows.
-- args: header, session, last known lease number
local function recover_session(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    advance(q)
    local known = tonumber(args[3])
    for _, text in ipairs(redis.call('HKEYS', q.key .. ':ch')) do
        local c = tonumber(text)
        local chunk = get_chunk(q, c)
        local lost, kept = {}, {}
        for _, lease in ipairs(chunk and chunk.leases or {}) do
            local list = lease.session == args[2] and lease.lease > known and lost or kept
            list[#list + 1] = lease
        end
        if #lost > 0 then
            chunk.leases, chunk.dirty = kept, true
            for _, lease in ipairs(lost) do
                end_lease(q, c, lease, lease.set)
                each(lease.set, function(index) put_back(q, chunk, c, index, true) end)
            end
        end
    end
    return { finish(q, true) }
end
register('landline2_recover', recover_session, 'allow-oom')

-- What is still live of leases a node holds, for a node that may have missed a notice. args: header, -, groups
local function check_group(q, text)
    local c, number, _, set = read_group(text)
    local chunk = get_chunk(q, c)
    local live
    local deadline = 0
    for _, lease in ipairs(chunk and chunk.leases or {}) do
        if lease.lease == number then
            local part = split(lease.set, set)
            if part then
                live = live and join(live, part) or part
                deadline = max(deadline, lease.deadline)
            end
        end
    end
    if not live then return '' end
    return struct.pack('<I8', deadline) .. pack_set(live)
end
register('landline2_check', settle(check_group, true), 'allow-oom')

-- Use is noted to this precision where nothing else is written.
local USE_MS = 60000

-- Whether a look at a queue has nothing to write, as most looks at idle queues have.
local function is_idle(q, what)
    if q.now >= q.due or q.seen > q.op then return false end
    if what == '0' then return true end
    if q.now - q.used >= USE_MS then return false end
    if what == '3' then return true end
    return what == '1' and available(q) == 0 and redis.call('ZSCORE', q.key .. ':wt', q.node) ~= false
end

-- Carries out what is due. args: header, '1' when sessions of the node wait, '2' to pass a turn on to other nodes, '3' when
-- the queue is in use, '4' to note its use now
local function sweep(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if is_idle(q, args[2]) then return { struct.pack('<I8I8I8I4I1I4', q.now, q.due, q.op, 0, 0, 0), '', '' } end
    advance(q)
    if args[2] ~= '0' then q.used = q.now end
    if args[2] == '1' then
        flush_lists(q)
        if available(q) > 0 then q.wakes = 1 else register_waiting(q) end
    end
    return { finish(q, args[2] == '2') }
end
register('landline2_sweep', sweep, 'allow-oom')

end
-- ------------------------------------------------------------------------------------------------------------- publishing
local read_topic, write_topic, read_part, complete, trim_log
do -- see library.lua

local TOPIC = '<I8I8I8I1I8I4I8'

-- With `lane`, what that lane's last publish got is read too.
function read_topic(key, header, lane)
    local set_ms, node = struct.unpack('<i8c4', header)
    local stored = redis.call('HMGET', key, 'v', 's', lane and 'w:' .. lane or 'v')
    if not stored[2] then return nil, redis.error_reply('LLGONE no such topic') end
    if stored[1] ~= FORMAT then return nil, redis.error_reply('LLFORMAT stored format ' .. stored[1]) end
    local last_id, last_ms, version, closed, retention, snapshots, next_seq = struct.unpack(TOPIC, stored[2])
    return { key = key, node = node, last_id = last_id, last_ms = last_ms, version = version, closed = closed == 1,
        retention = retention, snapshots = snapshots, next_seq = next_seq, now = clock(set_ms, last_ms), id = 0, ms = 0,
        logged = false, repeated = false, lane = stored[3] }
end

function write_topic(t, ...)
    redis.call('HSET', t.key, 's', struct.pack(TOPIC, t.last_id, t.last_ms, t.version, t.closed and 1 or 0, t.retention, t.snapshots,
        t.next_seq), ...)
end

-- Takes a chunk into a queue. Its payload was written before.
local function enqueue(q, e)
    if q.detached or (e.ms < q.floor and not q.retain) then
        redis.call('UNLINK', payload_key(q, e.payload))
        return
    end
    e.before = q.total
    local c = q.next_seq
    q.next_seq = c + e.n
    q.total = q.total + e.bytes
    q.stored = q.stored + e.n
    if e.ms < q.floor then
        redis.call('HSET', q.key .. ':gm', c, '*')
        q.masked = max(q.masked, c)
    else
        q.unacked = q.unacked + e.n
        q.bytes = q.bytes + e.bytes
        q.available = true
    end
    write_entry(q, c, e)
    by(q, e.ms + q.retention)
end

-- What a chunk is, as the caller sends it: payload id, count, bytes without the seals, flags, ordering keys.
function read_part(text)
    local payload, n, raw, flags, length, at = struct.unpack('<c8I2I4I1I2', text)
    return { payload = payload, n = n, raw = raw, flags = flags, id = 0, ms = 0, bytes = 0, before = 0,
        keys = length > 0 and sub(text, at, at + length - 1) or '' }
end

function complete(e, id, ms)
    e.id, e.ms = id, ms
    e.bytes = e.raw + e.n * seal_bytes(e)
end

-- Forgets up to `count` old chunks of the topic's log; answers whether there may be more.
function trim_log(t, count)
    if t.snapshots > 0 then return false end
    local name = t.key .. ':cx'
    local rows = redis.call('XRANGE', name, '-', '+', 'COUNT', count)
    for _, row in ipairs(rows) do
        local payload, _, _, ms = struct.unpack('<c8I2I4I8', row[2][2])
        if t.retention > 0 and ms + t.retention > t.now then return false end
        redis.call('XDEL', name, row[1])
        redis.call('UNLINK', t.key .. ':p:' .. hex(payload))
    end
    return #rows == count
end

-- Keeps a chunk in the topic's own log. `left_out` names the messages that queues filtered.
local function log_chunk(t, e, left_out)
    local text = struct.pack('<c8I2I4I8I8I1I2', e.payload, e.n, e.bytes, e.ms, e.id, e.flags, #e.keys) .. e.keys .. left_out
    redis.call('XADD', t.key .. ':cx', t.next_seq .. '-0', 'd', text)
    t.next_seq = t.next_seq + e.n
    trim_log(t, 20)
end

local LANE = '<I8I8I8I1'
-- A publish is repeated within seconds, so that what a lane got is not needed after this.
local LANE_MS = 3600000

-- Forgets what nodes got that have not published for long: most of them are no more.
local function forget_lanes(t)
    local all, old = redis.call('HGETALL', t.key), {}
    for at = 1, #all, 2 do
        if sub(all[at], 1, 2) == 'w:' then
            local _, _, ms = struct.unpack(LANE, all[at + 1])
            if ms + LANE_MS < t.now then old[#old + 1] = all[at] end
        end
    end
    if #old > 0 then bulk('HDEL', t.key, old) end
end

-- Gives ids and a publish time. Answers nil and an error, or the topic and what an earlier call of the same number got.
local function start_publish(key, header, version, count, lane, number)
    local t, err = read_topic(key, header, lane)
    if not t then return nil, err end
    if t.closed then return nil, redis.error_reply('LLGONE the topic is closed') end
    if t.lane then
        local last, id, ms, logged = struct.unpack(LANE, t.lane)
        if last == number then
            t.id, t.ms, t.repeated, t.logged = id, ms, true, logged == 1
            return t
        end
    else
        forget_lanes(t)
    end
    if t.version ~= version then return nil, redis.error_reply('LLSTALE route') end
    local micros = t.now * 1000
    t.id = max(t.last_id + 1, micros)
    t.last_id = t.id + count - 1
    t.ms = t.now
    t.last_ms = t.now
    t.logged = t.retention > 0 or t.snapshots > 0
    return t
end

-- Writes the topic after a publish.
local function end_publish(t, lane, number)
    write_topic(t, 'w:' .. lane, struct.pack(LANE, number, t.id, t.ms, t.logged and 1 or 0))
end

-- Everything of one publish where all keys are on one server.
-- keys: topic, its queues; args: header, route version, count, lane, number, the whole chunk, what queues left out, how many
-- queues take the whole, then for each queue its own chunk, '' for a copy of the whole, or '-' for nothing. The whole
-- chunk's payload lies at the topic.
local function publish(keys, args)
    local whole = read_part(args[6])
    local source = keys[1] .. ':p:' .. hex(whole.payload)
    local count = tonumber(args[3])
    local t, err = start_publish(keys[1], args[1], tonumber(args[2]), count, args[4], tonumber(args[5]))
    local function discard()
        redis.call('UNLINK', source)
        for at = 2, #keys do
            if #args[7 + at] > 1 then
                redis.call('UNLINK', keys[at] .. ':p:' .. hex(read_part(args[7 + at]).payload))
            end
        end
    end
    if not t then
        discard()
        return err
    end
    local answer = { struct.pack('<I8I8I8', t.id, t.ms, t.now) }
    if t.repeated then
        if not t.logged then redis.call('UNLINK', source) end
        return answer
    end
    complete(whole, t.id, t.ms)
    local copied = 0
    for at = 2, #keys do
        local q = open_at(keys[at], args[1], t.now)
        local part = args[7 + at]
        if q and part ~= '-' then
            local e = part == '' and { payload = whole.payload, n = whole.n, bytes = whole.bytes, flags = whole.flags,
                keys = whole.keys, id = t.id, ms = t.ms, before = 0 } or read_part(part)
            if part == '' then
                copied = copied + 1
                local last = copied == tonumber(args[8]) and not t.logged
                redis.call(last and 'RENAME' or 'COPY', source, payload_key(q, e.payload))
            else
                complete(e, t.id, t.ms)
            end
            if e.keys ~= '' and not q.ordered then e.keys = '' end
            enqueue(q, e)
            answer[#answer + 1] = (finish(q, false))
        else
            answer[#answer + 1] = ''
        end
    end
    if t.logged then
        log_chunk(t, whole, args[7])
    else
        if copied == 0 then redis.call('UNLINK', source) end
    end
    end_publish(t, args[4], tonumber(args[5]))
    return answer
end

-- What a publish got whose answer was lost, or nothing when it did not happen. args: header, lane, number
local function published(keys, args)
    local earlier = redis.call('HGET', keys[1], 'w:' .. args[2])
    if not earlier then return '' end
    local last, id, ms = struct.unpack(LANE, earlier)
    return last == tonumber(args[3]) and struct.pack('<I8I8I8', id, ms, ms) or ''
end
register('landline2_published', published, 'no-writes')

-- The first step of a publish over several slots. args: header, route version, count, lane, number
local function begin_publish(keys, args)
    local t, err = start_publish(keys[1], args[1], tonumber(args[2]), tonumber(args[3]), args[4], tonumber(args[5]))
    if not t then return err end
    if not t.repeated then end_publish(t, args[4], tonumber(args[5])) end
    return { struct.pack('<I8I8I8I1', t.id, t.ms, t.now, t.logged and 1 or 0) }
end

-- The second step, for one queue. args: header, lane, number, id, publish time, the queue's chunk
local function put(keys, args)
    local q, err = open_at(keys[1], args[1])
    local e = read_part(args[6])
    if not q then
        redis.call('UNLINK', keys[1] .. ':p:' .. hex(e.payload))
        return err
    end
    if redis.call('HGET', q.key .. ':w', args[2]) == args[3] then return { finish(q, false) } end
    redis.call('HSET', q.key .. ':w', args[2], args[3])
    complete(e, tonumber(args[4]), tonumber(args[5]))
    if not q.ordered then e.keys = '' end
    enqueue(q, e)
    return { finish(q, false) }
end

-- The second step for the topic's log. args: header, id, publish time, the chunk, what queues left out
local function put_log(keys, args)
    local t, err = read_topic(keys[1], args[1])
    local e = read_part(args[4])
    if not t or t.closed then
        redis.call('UNLINK', keys[1] .. ':p:' .. hex(e.payload))
        return err or 'OK'
    end
    complete(e, tonumber(args[2]), tonumber(args[3]))
    log_chunk(t, e, args[5])
    write_topic(t)
    return 'OK'
end

register('landline2_publish', publish)
register('landline2_begin_publish', begin_publish)
register('landline2_put', put)
register('landline2_put_log', put_log)

end
-- ---------------------------------------------------------------------------------------------- topics and queues come and go
local drop_deliveries
do -- see library.lua

-- args: header, retention in ms or 0
local function open_topic(keys, args)
    local set_ms = struct.unpack('<i8', args[1])
    local t, err = read_topic(keys[1], args[1])
    if not t then
        if redis.call('EXISTS', keys[1]) == 1 then return err end
        t = { key = keys[1], last_id = 0, last_ms = clock(set_ms), version = 1, closed = false, snapshots = 0, next_seq = 1 }
        redis.call('HSET', keys[1], 'v', FORMAT)
    end
    if t.closed then return redis.error_reply('LLGONE the topic is closed') end
    t.retention = tonumber(args[2])
    write_topic(t)
    return 'OK'
end

local function close_topic(keys, args)
    local t = read_topic(keys[1], args[1])
    if not t or t.closed then return 'OK' end
    t.closed = true
    t.version = t.version + 1
    t.retention = 0
    write_topic(t)
    redis.call('DEL', t.key .. ':rt')
    for _, field in ipairs(redis.call('HKEYS', t.key)) do
        if sub(field, 1, 2) == 'w:' then redis.call('HDEL', t.key, field) end
    end
    return 'OK'
end

-- args: header, subscription name, queue key, '1' to attach or '0' to take away
local function attach(keys, args)
    local t, err = read_topic(keys[1], args[1])
    if not t then return args[4] == '1' and err or 'OK' end
    if args[4] == '1' then
        if t.closed then return redis.error_reply('LLGONE the topic is closed') end
        if redis.call('HSET', t.key .. ':rt', args[2], args[3]) == 0 then return 'OK' end
    elseif redis.call('HGET', t.key .. ':rt', args[2]) ~= args[3] or redis.call('HDEL', t.key .. ':rt', args[2]) == 0 then
        return 'OK'
    end
    t.version = t.version + 1
    write_topic(t)
    return 'OK'
end

local function route(keys, args)
    local t, err = read_topic(keys[1], args[1])
    if not t then return err end
    if t.closed then return redis.error_reply('LLGONE the topic is closed') end
    return { t.version, redis.call('HGETALL', t.key .. ':rt') }
end

register('landline2_open_topic', open_topic, 'allow-oom')
register('landline2_close_topic', close_topic, 'allow-oom')
register('landline2_attach', attach, 'allow-oom')
register('landline2_route', route, 'no-writes')

local function put_back_dead(q, places)
    for _, place in ipairs(places) do
        local c, index = struct.unpack(PLACE, place)
        local chunk = get_chunk(q, c)
        local retry = live_retry(q, c + index)
        if chunk and retry and retry.place == 'X' then
            local k = key_of(q, chunk, index)
            if k then
                retry.place, retry.dirty = 'N', true
                local key = get_key(q, k)
                to_line(q, k, key, c, index)
                key_changed(q, k, key)
            else
                make_ready(q, c, index, false)
            end
        end
    end
    bulk('ZREM', q.key .. ':dd', places)
end

-- args: header, ordered, exactly once, retry min, retry max, attempts, retention, retain acked, topic key, subscription name
local function open_queue(keys, args)
    local set_ms, node = struct.unpack('<i8c4', args[1])
    local q, err = open_at(keys[1], args[1])
    local retained = false
    if q then
        retained = q.retain
    else
        if redis.call('EXISTS', keys[1]) == 1 then return err end
        local now = clock(set_ms)
        q = fresh_queue(keys[1], node)
        q.now, q.last, q.lease, q.used = now, now, now * 1000, now
        redis.call('HSET', keys[1], 'v', FORMAT, 't', args[9], 'n', args[10])
    end
    q.ordered, q.once, q.retry_min, q.retry_max = args[2] == '1', args[3] == '1', tonumber(args[4]), tonumber(args[5])
    q.max_attempts, q.retention, q.retain = tonumber(args[6]), tonumber(args[7]), args[8] == '1'
    write_config(q)
    q.used = q.now
    advance(q)
    -- What was acknowledged and kept is kept no longer.
    if retained and not q.retain then q.trim = max(q.trim, q.cur) end
    q.due = q.now -- retention may be shorter now
    if q.max_attempts == 0 then
        -- Attempts count only while there is a policy.
        put_back_dead(q, redis.call('ZRANGE', q.key .. ':dd', 0, -1))
        local all = redis.call('HGETALL', q.key .. ':rt')
        for at = 1, #all, 2 do
            local retry = get_retry(q, tonumber(all[at]))
            if retry and not retry.gone and retry.counted > 0 then retry.counted, retry.dirty = 0, true end
        end
    end
    return { finish(q, false) }
end

-- Ends every delivery and forgets what was remembered of single messages.
function drop_deliveries(q)
    for _, text in ipairs(redis.call('HKEYS', q.key .. ':ch')) do
        local c = tonumber(text)
        for _, lease in ipairs((get_chunk(q, c) or { leases = {} }).leases) do end_lease(q, c, lease, lease.set) end
    end
    local names = { 'ch', 'ls', 'rt', 'rd', 'dl', 'dd', 'ky', 'kf', 'kb', 'sd', 'so', 'mk' }
    for _, k in ipairs(redis.call('HKEYS', q.key .. ':ky')) do redis.call('UNLINK', q.key .. ':kl:' .. hex(k)) end
    for _, name in ipairs(names) do redis.call('UNLINK', q.key .. ':' .. name) end
    q.chunks, q.retries, q.keys = {}, {}, {}
    q.to_front, q.to_back, q.to_free, q.to_owned, q.to_park = {}, {}, {}, {}, {}
    q.out = 0
end

local function detach_queue(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if not q.detached then
        advance(q)
        drop_deliveries(q)
        q.detached = true
        q.unacked, q.bytes, q.cur, q.skip = 0, 0, q.next_seq, 0
        q.trim, q.barrier = q.next_seq, q.lease + 1
        q.retain = false
        write_config(q)
        redis.call('UNLINK', q.key .. ':w')
        q.due = q.now
        for _, node in ipairs(redis.call('ZRANGE', q.key .. ':wt', 0, -1)) do
            tell(node, struct.pack('<c1I4I2', 'W', 65535, #q.key) .. q.key)
        end
        redis.call('DEL', q.key .. ':wt')
        q.waiting = 0
    end
    return { finish(q, false) }
end

-- The record of this version is written: who acts on an older one has to read it. args: header, version, or INFINITE when the
-- record is deleted.
local function renew_queue(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    q.version = max(q.version, tonumber(args[2]))
    write_config(q)
    return { finish(q, false) }
end
register('landline2_renew_queue', renew_queue, 'allow-oom')

-- The same for a topic, where the route's version tells it.
local function renew_topic(keys, args)
    local t, err = read_topic(keys[1], args[1])
    if not t then return err end
    t.version = t.version + 1
    write_topic(t)
    return 'OK'
end
register('landline2_renew_topic', renew_topic, 'allow-oom')

-- Removes what a closed queue left, in steps. Answers whether there is more.
local function purge(keys, args)
    local key = keys[1]
    local rows = redis.call('XRANGE', key .. ':cx', '-', '+', 'COUNT', 500)
    local ids, payloads = {}, {}
    for at, row in ipairs(rows) do
        ids[at] = row[1]
        payloads[at] = key .. ':p:' .. hex(sub(row[2][2], 1, 8))
    end
    if #ids > 0 then
        redis.call('XDEL', key .. ':cx', unpack(ids))
        redis.call('UNLINK', unpack(payloads))
    end
    if #rows == 500 then return 1 end
    redis.call('UNLINK', key, key .. ':cx', key .. ':gm', key .. ':mk', key .. ':wt', key .. ':w')
    return 0
end

-- The same for a topic's log beyond its retention; a closed topic that no snapshot needs goes altogether.
local function trim(keys, args)
    local t = read_topic(keys[1], args[1])
    if not t then return 0 end
    if trim_log(t, 500) then return 1 end
    if t.closed and t.snapshots == 0 then redis.call('UNLINK', t.key, t.key .. ':cx', t.key .. ':sns') end
    return 0
end
register('landline2_trim', trim, 'allow-oom')

register('landline2_open_queue', open_queue, 'allow-oom')
register('landline2_detach_queue', detach_queue, 'allow-oom')
register('landline2_purge', purge, 'allow-oom')

-- ------------------------------------------------------------------------------------------------------------ dead letters

-- args: header, at most, held for ms
local function take_dead(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    advance(q)
    local answer = { '', '', '' }
    local places = redis.call('ZRANGEBYSCORE', q.key .. ':dd', '-inf', 0, 'LIMIT', 0, tonumber(args[2]))
    local until_ms = q.now + tonumber(args[3])
    for _, place in ipairs(places) do
        local c, index = struct.unpack(PLACE, place)
        local chunk = get_chunk(q, c)
        local retry = live_retry(q, c + index)
        if chunk and retry and retry.place == 'X' then
            q.lease = q.lease + 1
            retry.aux, retry.dirty = q.lease, true
            redis.call('ZADD', q.key .. ':dd', until_ms, place)
            by(q, until_ms)
            local ends = offsets(q, chunk, index, index)
            answer[#answer + 1] = struct.pack('<I8c8I2I8I8I1I4I4I2I8I2I2', c, chunk.payload, chunk.n, chunk.ms, chunk.id, chunk.flags,
                ends and ends[index - 1] or 0, ends and ends[index] or 0, index, q.lease, retry.failures, retry.counted)
        else
            redis.call('ZREM', q.key .. ':dd', place)
        end
    end
    answer[1], answer[2], answer[3] = finish(q, false)
    return answer
end

-- args: header, '1' when forwarded, then chunk, lease, index of each
local function settle_dead(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    advance(q)
    local back = {}
    for at = 3, #args do
        local c, number, index = struct.unpack('<I8I8I2', args[at])
        local chunk = get_chunk(q, c)
        local retry = chunk and live_retry(q, c + index)
        if retry and retry.place == 'X' and retry.aux == number then
            local place = struct.pack(PLACE, c, index)
            if args[2] == '1' then
                redis.call('ZREM', q.key .. ':dd', place)
                forget_retry(q, c + index)
                drop(q, chunk, 1)
            else
                back[#back + 1] = place
            end
        end
    end
    put_back_dead(q, back)
    return { finish(q, true) }
end

register('landline2_take_dead', take_dead, 'allow-oom')
register('landline2_settle_dead', settle_dead, 'allow-oom')

local function oldest_unacked(q)
    local first = INFINITE
    for _, text in ipairs(redis.call('HVALS', q.key .. ':ch')) do
        local _, _, _, _, ms = struct.unpack(CHUNK, text)
        first = min(first, ms)
    end
    local from = q.cur
    while first == INFINITE or from == q.cur do
        local rows = redis.call('XRANGE', q.key .. ':cx', from, '+', 'COUNT', 10)
        for _, row in ipairs(rows) do
            local e = read_entry(row)
            from = e.c + e.n
            local mask = mask_of(q, e.c)
            if not mask or not (mask.lo == 0 and mask.hi >= e.n - 1 and not mask.bm) then return min(first, e.ms) end
        end
        if #rows < 10 then break end
    end
    return first == INFINITE and 0 or first
end

local function stats(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    advance(q)
    flush_retries(q)
    flush_chunks(q)
    local key = q.key
    local numbers = { q.unacked, q.bytes, oldest_unacked(q), q.out, redis.call('ZCARD', key .. ':dl'), redis.call('ZCARD', key .. ':dd'),
        q.retain and max(q.stored - q.unacked, 0) or 0, q.used }
    local head, ended, owners = finish(q, false)
    return { head, ended, owners, numbers }
end
register('landline2_stats', stats, 'allow-oom')

end
-- ---------------------------------------------------------------------------------------------------------------- seeking
do -- see library.lua

-- Which messages of chunks before the cursor are unacknowledged: chunk -> set.
local function unacked_sets(q)
    local sets = {}
    local marks = {}
    for _, text in ipairs(redis.call('HKEYS', q.key .. ':ch')) do
        local c = tonumber(text)
        local chunk = get_chunk(q, c)
        local live
        for _, lease in ipairs(chunk.leases) do live = live and join(live, lease.set) or lease.set end
        if c == q.cur and q.skip > 0 and q.skip < chunk.n then
            local rest = { lo = q.skip, hi = chunk.n - 1, count = chunk.n - q.skip }
            live = live and join(live, rest) or rest
        end
        local mask = live and c == q.cur and mask_of(q, c)
        if mask then
            local _, rest = split(live, mask)
            live = rest
        end
        sets[c] = live or false
        marks[c] = {}
        if (live and live.count or 0) < chunk.unacked and q.ordered and chunk.keys ~= '' then
            -- What is parked in a line has no record of its own.
            for index = 0, chunk.n - 1 do
                local k = key_of(q, chunk, index)
                if k and redis.call('ZSCORE', q.key .. ':kl:' .. hex(k), struct.pack(PLACE, c, index)) then marks[c][index] = true end
            end
        end
    end
    local all = redis.call('HGETALL', q.key .. ':rt')
    for at = 1, #all, 2 do
        local _, _, _, _, c = struct.unpack(RETRY, all[at + 1])
        if marks[c] then marks[c][tonumber(all[at]) - c] = true end
    end
    for c, list in pairs(marks) do
        if next(list) then
            local chunk = get_chunk(q, c)
            local waiting = from_marks(list, 0, chunk.n - 1)
            sets[c] = sets[c] and join(sets[c], waiting) or waiting
        end
    end
    return sets
end

-- The first entry published at `ms` or later, or nil.
local function find_entry(q, ms)
    local lo, hi = 1, q.next_seq
    while lo < hi do
        local middle = floor((lo + hi) / 2)
        local rows = redis.call('XRANGE', q.key .. ':cx', middle, '+', 'COUNT', 1)
        if not rows[1] then
            hi = middle
        else
            local e = read_entry(rows[1])
            if e.ms >= ms then hi = middle else lo = e.c + 1 end
        end
    end
    local rows = redis.call('XRANGE', q.key .. ':cx', lo, '+', 'COUNT', 1)
    return rows[1] and read_entry(rows[1])
end

-- Counts the messages and bytes from entry `first` on that are unacknowledged after the move.
local function recount(q, first)
    q.unacked, q.bytes = 0, 0
    local from = first.c
    local border = max(q.holes, q.masked + 1)
    while from < border do
        local rows = redis.call('XRANGE', q.key .. ':cx', from, border - 1, 'COUNT', 200)
        for _, row in ipairs(rows) do
            local e = read_entry(row)
            local unacked = unmasked(e, mask_of(q, e.c))
            q.unacked = q.unacked + unacked
            q.bytes = q.bytes + floor(e.bytes * unacked / e.n)
            from = e.c + e.n
        end
        if #rows < 200 then break end
    end
    local rows = redis.call('XRANGE', q.key .. ':cx', max(from, border), '+', 'COUNT', 1)
    if rows[1] then
        local e = read_entry(rows[1])
        q.unacked = q.unacked + q.next_seq - e.c
        q.bytes = q.bytes + q.total - e.before
    end
end

-- Entries that one call looks at before a seek: some milliseconds.
local TRIMMED_PER_CALL = 500

-- Removes entries from `from` on that were acknowledged and are kept no longer. Answers where to go on, or nil.
local function trim_entries(q, from)
    if from >= q.trim then return nil end
    local rows = redis.call('XRANGE', q.key .. ':cx', from, q.trim - 1, 'COUNT', TRIMMED_PER_CALL)
    local last = from
    for _, row in ipairs(rows) do
        local e = read_entry(row)
        last = e.c
        if not get_chunk(q, e.c) then
            if e.c < q.pinned then
                redis.call('HSET', q.key .. ':gm', e.c, '*')
                q.masked = max(q.masked, e.c)
            else
                forget_entry(q, e)
            end
        end
    end
    return #rows == TRIMMED_PER_CALL and last + 1 or nil
end

-- args: header, time, the entry to begin with. Answers where to go on when there is more to do before the seek, or 0.
local function seek_time(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if q.detached then return { finish(q, false) } end
    q.used = q.now
    advance(q)
    flush_lists(q)
    flush_retries(q)
    flush_chunks(q)
    flush_keys(q)
    local more = trim_entries(q, tonumber(args[3]))
    if more then
        local head, ended, owners = finish(q, false)
        return { head, ended, owners, more }
    end
    local ms = tonumber(args[2])
    if not q.retain then
        -- What was acknowledged without being kept does not come back.
        for c, set in pairs(unacked_sets(q)) do
            local chunk = get_chunk(q, c)
            local whole = { lo = 0, hi = chunk.n - 1, count = chunk.n }
            local _, gone = whole, whole
            if set then _, gone = split(whole, set) end
            if gone then
                redis.call('HSET', q.key .. ':gm', c, pack_set(gone))
                q.masked = max(q.masked, c)
            end
        end
    end
    drop_deliveries(q)
    if redis.call('HLEN', q.key .. ':gm') == 0 then q.masked = 0 end
    local first = find_entry(q, ms)
    if first then
        q.cur = first.c
        recount(q, first)
    else
        q.cur, q.unacked, q.bytes = q.next_seq, 0, 0
    end
    q.skip = 0
    q.trim = q.retain and 0 or q.cur
    q.lease = q.lease + 1
    q.barrier = q.lease + 1
    q.floor = ms > q.now and ms or 0
    q.available = true
    q.due = q.now
    local head, ended, owners = finish(q, true)
    return { head, ended, owners, 0 }
end
register('landline2_seek_time', seek_time, 'allow-oom')

-- ---------------------------------------------------------------------------------- seeking beyond the queue's own messages
-- A seek that needs messages of the topic's log or of a snapshot rebuilds the index. The node surveys the queue, writes the
-- missing payloads and a plan, and has the plan carried out in parts, beside the index in use. At the end the new index takes
-- the place of the old one at once. Entries that came after the survey stand behind the rest.
--
-- Meanwhile the queue is pinned: what is acknowledged stays in the index, so that the new one never names what is gone.
-- A plan's keys, all named after its list, expire with it:
--   (list)  what to do, one step an entry         :x  the new index              :g, :m  its masks
--   :s      how far it is                         :d  payloads that the new index does not need

-- The new index begins this far behind the old one, more than is published meanwhile.
local LEAP = 1073741824
-- What a step of the plan or a moved entry costs is about 15 us: some milliseconds a call.
local MOVES_PER_CALL = 300
local PLAN_LIFE_MS = 600000
local PLAN = '<I8I8I8I8I8I8I8I8'

local function write_back(q)
    flush_lists(q)
    flush_retries(q)
    flush_chunks(q)
    flush_keys(q)
end

-- args: header, what stays in the index until `release_pin` or a switch: '1' what is there, '2' everything
local function survey(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if q.detached then return redis.error_reply('LLGONE the queue is detached') end
    advance(q)
    write_back(q)
    local list = {}
    for c, set in pairs(unacked_sets(q)) do list[#list + 1] = struct.pack('<I8', c) .. (set and pack_set(set) or '') end
    local pin = 0
    if args[2] == '2' then
        pin = PINNED + q.now + PLAN_LIFE_MS
    elseif q.pinned <= PINNED then
        pin = q.next_seq
    end -- a seek holds everything anyway
    if pin > 0 then q.pinned = pin end
    q.chunks = {}
    local state = struct.pack('<I8I8I4I1I8I8', q.next_seq, q.cur, q.skip, q.retain and 1 or 0, q.retention, pin)
    local head, ended, owners = finish(q, false)
    return { head, ended, owners, state, list }
end
register('landline2_survey', survey, 'allow-oom')

-- args: header, the pin
local function release_pin(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if q.pinned ~= tonumber(args[2]) then return { finish(q, false) } end
    q.pinned = 0
    if not q.retain then
        local all = redis.call('HGETALL', q.key .. ':gm')
        for at = 1, #all, 2 do
            local c = tonumber(all[at])
            local rows = all[at + 1] == '*' and c < q.cur and redis.call('XRANGE', q.key .. ':cx', c, c)
            if rows and rows[1] and not get_chunk(q, c) then
                forget_entries(q, { read_entry(rows[1]) })
                redis.call('HDEL', q.key .. ':gm', c)
            end
        end
    end
    return { finish(q, false) }
end
register('landline2_release_pin', release_pin, 'allow-oom')

local function read_plan(q, plan)
    local text = redis.call('GET', plan .. ':s')
    if not text then return nil end
    local p = { name = plan }
    p.first, p.next_seq, p.total, p.stored, p.unacked, p.bytes, p.masked, p.caught = struct.unpack(PLAN, text)
    return p
end

-- One step of a plan: `K`eep an own entry, with a mask that is 'n'one, 'm' until the next seek or 'g' for good; or `I`mport.
local function plan_step(q, text)
    local kind, at = sub(text, 1, 1), 2
    if kind == 'N' then return nil end
    local e
    if kind == 'K' then
        local c, how
        c, how, at = struct.unpack('<I8c1', text, at)
        local rows = redis.call('XRANGE', q.key .. ':cx', c, c)
        if not rows[1] then return end -- beyond its retention meanwhile
        e = read_entry(rows[1])
        if how ~= 'n' then e.mask, e.how = unpack_set(text, at), how end
    else
        local id, ms
        id, ms, at = struct.unpack('<I8I8', text, at)
        e = read_part(sub(text, at))
        complete(e, id, ms)
        if not q.ordered then e.keys = '' end
        redis.call('PERSIST', payload_key(q, e.payload))
    end
    return e
end

-- Puts an entry at the end of the new index.
local function place(p, e)
    local c = p.next_seq
    p.next_seq = c + e.n
    e.before = p.total
    p.total = p.total + e.bytes
    p.stored = p.stored + e.n
    local unacked = e.n
    if e.mask then
        redis.call('HSET', p.name .. (e.how == 'g' and ':g' or ':m'), c, pack_set(e.mask))
        p.masked = max(p.masked, c)
        unacked = unmasked(e, e.mask)
    end
    p.unacked = p.unacked + unacked
    p.bytes = p.bytes + floor(e.bytes * unacked / e.n)
    redis.call('XADD', p.name .. ':x', c .. '-0', 'd',
        struct.pack(ENTRY, e.payload, e.n, e.bytes, e.ms, e.id, e.flags, e.before, #e.keys) .. e.keys)
end

-- Places up to `count` entries that came after the survey; answers whether these were all.
local function catch_up(q, p, count)
    local rows = redis.call('XRANGE', q.key .. ':cx', p.caught, '+', 'COUNT', count)
    for _, row in ipairs(rows) do
        local e = read_entry(row)
        local gone = redis.call('HGET', q.key .. ':gm', e.c)
        if gone then e.mask, e.how = read_mask(gone), 'g' end
        p.caught = e.c + e.n
        place(p, e)
    end
    return #rows < count
end

-- Carries out some of a plan. args: header, end of the survey, the pin, the plan's list. Answers 1 when all of it is done, 0
-- when there is more to do, -1 when another seek has begun since or this one took too long.
local function seek_part(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if q.detached then return redis.error_reply('LLGONE the queue is detached') end
    local plan, done = q.key .. ':sg:' .. args[4], -1
    if q.pinned == tonumber(args[3]) then
        local first = q.next_seq + LEAP
        local p = read_plan(q, plan) or { name = plan, first = first, next_seq = first, total = 0, stored = 0, unacked = 0,
            bytes = 0, masked = 0, caught = tonumber(args[2]) }
        local steps = redis.call('LPOP', plan, MOVES_PER_CALL)
        for _, text in ipairs(steps or {}) do
            local e = plan_step(q, text)
            if e then place(p, e) end
        end
        done = not steps and catch_up(q, p, MOVES_PER_CALL) and 1 or 0
        redis.call('SET', plan .. ':s', struct.pack(PLAN, p.first, p.next_seq, p.total, p.stored, p.unacked, p.bytes, p.masked,
            p.caught))
        for _, name in ipairs({ ':s', ':x', ':g', ':m' }) do redis.call('PEXPIRE', plan .. name, PLAN_LIFE_MS) end
    end
    local head, ended, owners = finish(q, false)
    return { head, ended, owners, done }
end
register('landline2_seek_part', seek_part)

local function take_over(from, to)
    redis.call('UNLINK', to)
    if redis.call('EXISTS', from) == 1 then
        redis.call('RENAME', from, to)
        redis.call('PERSIST', to)
    end
end

-- Lets the new index take the place of the old one. args: header, time that messages to come must have or 0, the pin, the
-- plan's list. Answers as `seek_part`.
local function seek_switch(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if q.detached then return redis.error_reply('LLGONE the queue is detached') end
    local plan, done = q.key .. ':sg:' .. args[4], 1
    local p = q.pinned == tonumber(args[3]) and read_plan(q, plan)
    if p then
        advance(q)
        write_back(q)
        drop_deliveries(q)
        repeat until catch_up(q, p, 500)
        take_over(plan .. ':x', q.key .. ':cx')
        take_over(plan .. ':g', q.key .. ':gm')
        take_over(plan .. ':m', q.key .. ':mk')
        redis.call('UNLINK', plan .. ':s', plan)
        redis.call('PERSIST', plan .. ':d')
        -- A repetition of this call is told by it.
        redis.call('HSET', q.key, 'sp', args[4])
        q.next_seq, q.total, q.stored, q.unacked, q.bytes, q.masked = p.next_seq, p.total, p.stored, p.unacked, p.bytes, p.masked
        q.cur, q.skip, q.trim, q.holes, q.pinned = p.first, 0, p.first, p.first, 0
        q.used, q.floor = q.now, tonumber(args[2])
        q.lease = q.lease + 1
        q.barrier = q.lease + 1
        q.available = true
        q.due = q.now
    elseif redis.call('HGET', q.key, 'sp') ~= args[4] then
        done = -1
    end
    local head, ended, owners = finish(q, p and true or false)
    return { head, ended, owners, done }
end
register('landline2_seek_switch', seek_switch)

-- Removes payloads that the last switch left without an entry. args: header. Answers whether there are more.
local function seek_tidy(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    local last, more = redis.call('HGET', q.key, 'sp'), 0
    local list = last and redis.call('LPOP', q.key .. ':sg:' .. last .. ':d', 500)
    if list then
        for at, payload in ipairs(list) do list[at] = payload_key(q, payload) end
        redis.call('UNLINK', unpack(list))
        more = 1
    end
    local head, ended, owners = finish(q, false)
    return { head, ended, owners, more }
end
register('landline2_seek_tidy', seek_tidy, 'allow-oom')

-- args: header, snapshot. Answers the last message id before the snapshot; from then on the topic keeps every message.
local function open_snapshot(keys, args)
    local t, err = read_topic(keys[1], args[1])
    if not t then
        if redis.call('EXISTS', keys[1]) == 1 then return err end
        -- A deleted topic that nothing was kept of. Nothing is published to it any more: all messages are from before.
        t = { key = keys[1], last_id = 2 ^ 53 - 1, last_ms = 0, version = 1, closed = true, retention = 0, snapshots = 0, next_seq = 1 }
        redis.call('HSET', keys[1], 'v', FORMAT)
    end
    local known = redis.call('HGET', t.key .. ':sns', args[2])
    if known then return known end
    local boundary = string.format('%.0f', t.last_id)
    t.snapshots = t.snapshots + 1
    redis.call('HSET', t.key .. ':sns', args[2], boundary)
    write_topic(t)
    return boundary
end
register('landline2_open_snapshot', open_snapshot)

-- args: header, snapshot. Answers whether there is more to remove.
local function drop_snapshot(keys, args)
    local t = read_topic(keys[1], args[1])
    if not t then return 0 end
    local name = t.key .. ':sn:' .. args[2]
    local rows = redis.call('XRANGE', name, '-', '+', 'COUNT', 500)
    local ids, payloads = {}, {}
    for at, row in ipairs(rows) do
        ids[at] = row[1]
        payloads[at] = t.key .. ':p:' .. hex(sub(row[2][2], 1, 8))
    end
    if #ids > 0 then
        redis.call('XDEL', name, unpack(ids))
        redis.call('UNLINK', unpack(payloads))
    end
    if #rows == 500 then return 1 end
    redis.call('UNLINK', name)
    if redis.call('HDEL', t.key .. ':sns', args[2]) == 1 then
        t.snapshots = max(t.snapshots - 1, 0)
        write_topic(t)
    end
    return 0
end
register('landline2_drop_snapshot', drop_snapshot, 'allow-oom')

-- Answers retention, whether there are snapshots, and the boundary of one. args: header, snapshot or ''
local function topic_info(keys, args)
    local t = read_topic(keys[1], args[1])
    if not t then return { 0, 0, '' } end
    return { t.retention, t.snapshots, args[2] ~= '' and redis.call('HGET', t.key .. ':sns', args[2]) or '' }
end
register('landline2_topic_info', topic_info, 'no-writes')

end
-- ---------------------------------------------------------------------------------------------------------------- records
do -- see library.lua

-- All records lie in one slot. A change with an effect on other slots is noted as an intent first, then its effect is
-- carried out, then the record is written and the intent removed. Whoever meets an intent that was left behind carries it
-- out and completes it: every effect may be repeated. So a crash leaves a change that nobody was told about, done or undone.

local INTENT = '<I8I8I1'

local function write_record(key, kind, name, version, body, registered, channel)
    if body then
        redis.call('HSET', key .. ':b:' .. kind, name, struct.pack('<I8', version) .. body)
        redis.call('ZADD', key .. ':n:' .. kind, 0, name)
    else
        redis.call('HDEL', key .. ':b:' .. kind, name)
        redis.call('ZREM', key .. ':n:' .. kind, name)
    end
    if registered ~= '' then
        if sub(registered, 1, 1) == '+' then
            redis.call('HSET', key .. ':q', sub(registered, 2), name)
        else
            redis.call('HDEL', key .. ':q', sub(registered, 2))
        end
    end
    redis.call('PUBLISH', channel, kind .. name)
end

-- args: kind, name, expected version or '' for none, '1' with a body, body, effect or '', channel
local function begin_change(keys, args)
    local key, kind, name = keys[1], args[1], args[2]
    local format = redis.call('HGET', key, 'v')
    if format and format ~= FORMAT then return redis.error_reply('LLFORMAT stored format ' .. format) end
    local pending = redis.call('HGET', key .. ':i', kind .. name)
    if pending then return { 1, pending } end
    local current = redis.call('HGET', key .. ':b:' .. kind, name)
    local version = current and struct.unpack('<I8', current) or nil
    local expected = args[3] ~= '' and tonumber(args[3]) or nil
    if version ~= expected then return redis.error_reply('LLCONFLICT ' .. string.format('%.0f', version or 0)) end
    local next_version = redis.call('HINCRBY', key, 'n', 1)
    if not format then redis.call('HSET', key, 'v', FORMAT) end
    if args[6] == '' then
        write_record(key, kind, name, next_version, args[4] == '1' and args[5] or nil, '', args[7])
        return { 0, next_version }
    end
    local time = redis.call('TIME')
    redis.call('HSET', key .. ':i', kind .. name, struct.pack(INTENT, next_version, time[1], tonumber(args[4]))
        .. struct.pack('<I4', #args[6]) .. args[6] .. args[5])
    return { 0, next_version }
end

-- args: kind, name, version of the intent, queue to register ('+key'), to forget ('-key') or '', channel, '1' to give it up
local function end_change(keys, args)
    local key, kind, name = keys[1], args[1], args[2]
    local pending = redis.call('HGET', key .. ':i', kind .. name)
    if not pending then return 0 end
    local version, _, has_body, at = struct.unpack(INTENT, pending)
    if version ~= tonumber(args[3]) then return 0 end
    local length
    length, at = struct.unpack('<I4', pending, at)
    redis.call('HDEL', key .. ':i', kind .. name)
    if args[6] ~= '1' then
        write_record(key, kind, name, version, has_body == 1 and sub(pending, at + length) or nil, args[4], args[5])
    end
    return 1
end

-- args: kind, prefix, after, limit
local function list(keys, args)
    local key, kind, prefix, after = keys[1], args[1], args[2], args[3]
    local from = '[' .. prefix
    if after ~= '' and after >= prefix then from = '(' .. after end
    local names = redis.call('ZRANGEBYLEX', key .. ':n:' .. kind, from, prefix == '' and '+' or '[' .. prefix .. '\255', 'LIMIT', 0,
        tonumber(args[4]))
    if #names == 0 then return { {}, {} } end
    local bodies = {}
    for at = 1, #names, 1000 do
        local part = redis.call('HMGET', key .. ':b:' .. kind, unpack(names, at, min(at + 999, #names)))
        for _, body in ipairs(part) do bodies[#bodies + 1] = body end
    end
    return { names, bodies }
end

register('landline2_begin_change', begin_change)
register('landline2_end_change', end_change, 'allow-oom')
register('landline2_list', list, 'no-writes')
register('landline2_version', function() return 'LANDLINE_VERSION' end, 'no-writes')

end
-- ---------------------------------------------------------------------------------------------------------------- looking
-- Shows messages as they lie. Nothing is carried out that is due, and nothing is written: what a lease's end would change
-- shows once it was swept.

do -- see library.lua

-- Entries of the index that one call looks at: about 1 ms of server time.
local PEEK_ENTRIES = 200

-- Chunks before the cursor, or at it, that have unacknowledged messages, from `from` on in their order.
local function passed_chunks(q, from)
    local list = {}
    for _, text in ipairs(redis.call('HKEYS', q.key .. ':ch')) do
        local c = tonumber(text)
        if c + 65535 >= from then list[#list + 1] = c end
    end
    table.sort(list)
    return list
end

-- What is known of a chunk's messages: index -> a standing and its time.
local function standings(q, c, chunk)
    local known = {}
    local fields = {}
    for index = 0, chunk.n - 1 do fields[index + 1] = c + index end
    for first = 1, chunk.n, 1000 do
        local texts = redis.call('HMGET', q.key .. ':rt', unpack(fields, first, min(first + 999, chunk.n)))
        for at, text in ipairs(texts) do
            if text then
                local failures, _, place, aux = struct.unpack(RETRY, text)
                local time = place == 'D' and aux or 0
                known[first + at - 2] = { place == 'R' and 'W' or place, time, failures }
            end
        end
    end
    for _, lease in ipairs(chunk.leases) do
        each(lease.set, function(index)
            known[index] = { 'L', lease.deadline, known[index] and known[index][3] or 0 }
        end)
    end
    if q.ordered and chunk.keys ~= '' then
        for index = 0, chunk.n - 1 do
            local k = not known[index] and key_of(q, chunk, index)
            if k and redis.call('ZSCORE', q.key .. ':kl:' .. hex(k), struct.pack(PLACE, c, index)) then
                known[index] = { 'N', 0, 0 }
            end
        end
    end
    return known
end

-- Adds the messages of a chunk from `lo` on to the answer. `fresh` is the first index that the cursor has not passed. Answers
-- false, and the message where to go on, when the budget has ended.
local function show(q, look, c, chunk, lo, fresh, known)
    local mask = fresh < chunk.n and mask_of(q, c)
    local marks, details, first, last = {}, {}, nil, nil
    local ends = offsets(q, chunk, 0, chunk.n - 1)
    if not ends then return true end
    local stop
    for index = lo, chunk.n - 1 do
        local state = known[index]
        if not state and index >= fresh and not (mask and has(mask, index)) then state = { 'W', 0, 0 } end
        if state then
            -- What lies between the first and the last is read along.
            local bytes = ends[index] - ends[(first or index) - 1]
            if look.left == 0 or (look.any and look.bytes + bytes > look.max_bytes) then
                stop = index
                break
            end
            first, last = first or index, index
            marks[index] = true
            look.left, look.any, look.span = look.left - 1, true, bytes
            details[#details + 1] = struct.pack('<I2c1I8I2', index, state[1], state[2], min(state[3], 65535))
        end
    end
    if first then
        look.bytes = look.bytes + look.span
        local set = from_marks(marks, first, last)
        local from, to = 0, 0
        if first > 0 or last < chunk.n - 1 then from, to = ends[first - 1], ends[last] end
        look.answer[#look.answer + 1] = struct.pack('<I8c8I2I8I8I1I4I4I2', c, chunk.payload, chunk.n, chunk.ms, chunk.id, chunk.flags,
            from, to, #details) .. pack_set(set) .. concat(details)
    end
    if stop then return false, c + stop end
    return true
end

local function peek_passed(q, look, from)
    for _, c in ipairs(passed_chunks(q, from)) do
        local chunk = get_chunk(q, c)
        if chunk and c + chunk.n > from then
            if look.left == 0 then return c end
            local fresh = c == q.cur and q.skip or chunk.n
            local done, at = show(q, look, c, chunk, max(from - c, 0), fresh, standings(q, c, chunk))
            if not done then return at end
        end
        q.chunks[c] = nil
    end
    return nil
end

local function peek_fresh(q, look, from)
    local at = max(from, q.cur)
    -- A place within an entry lies behind the entry's id.
    local start = redis.call('XREVRANGE', q.key .. ':cx', at, '-', 'COUNT', 1)
    if start[1] then
        local e = read_entry(start[1])
        if e.c + e.n > at and e.c >= q.cur then at = e.c end
    end
    local rows = redis.call('XRANGE', q.key .. ':cx', at, '+', 'COUNT', PEEK_ENTRIES)
    for _, row in ipairs(rows) do
        local e = read_entry(row)
        -- The one under the cursor was shown as a chunk if any of it was given.
        if not (e.c == q.cur and q.skip > 0) then
            if look.left == 0 then return e.c end
            local done, stop = show(q, look, e.c, chunk_of(e), max(from - e.c, 0), 0, {})
            if not done then return stop end
        end
        at = e.c + e.n
    end
    return #rows == PEEK_ENTRIES and at or nil
end

-- args: header, from, max messages, max bytes. Answers where to go on, or 0, then the chunks.
local function peek(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    local from = tonumber(args[2])
    local look = { left = tonumber(args[3]), max_bytes = tonumber(args[4]), bytes = 0, span = 0, answer = { 0 } }
    if q.detached then return look.answer end
    local next_at = peek_passed(q, look, from)
    if not next_at then next_at = peek_fresh(q, look, from) end
    look.answer[1] = next_at or 0
    return look.answer
end
register('landline2_peek', peek, 'no-writes')

end
