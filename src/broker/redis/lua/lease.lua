-- ---------------------------------------------------------------------------------------------------------------- leasing
local seal_bytes, offsets, register_waiting
do -- see library.lua

-- Payloads up to so many bytes together, of so many chunks, are given along: copying more through Lua costs more than a call.
local INLINE_BYTES = 16384
local INLINE_CHUNKS = 20
-- Set in the flags of an answer where only the leased messages of a chunk are given along.
local PICKED = 128
-- Messages of keys that other sessions have which one call puts into the keys' lines, before it leaves the rest to the next:
-- about 1 ms of server time.
local PARKED_PER_CALL = 1000

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
    local taken, seqs = {}, {}
    for at, place in ipairs(places) do
        local c, index = struct.unpack(PLACE, place)
        seqs[at] = c + index
    end
    load_retries(q, seqs)
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
        local count = owner == ZERO and pick.takers > 1 and ceil(redis.call('LLEN', name) / pick.takers) or INFINITE
        while count > 0 and wants(pick) do
            local k = redis.call('LPOP', name)
            if not k then break end
            local key = get_key(q, k)
            if key.offered == owner then
                key.offered = NONE
                count = count - 1
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

local function park(q, pick, k, key, c, index)
    pick.parked = pick.parked + 1
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
    local key = q.keys[k] or get_key(q, k)
    if is_open(key, pick.session) then
        key_starts(q, k, key, pick.session, c)
        return true
    end
    park(q, pick, k, get_key(q, k), c, index)
    return false
end

local function lease_entry_keyed(q, pick, e, chunk, lo, mask)
    local c = e.c
    if q.ordered and e.keys ~= '' then load_keys(q, chunk, { lo = lo, hi = min(lo + pick.left, e.n) - 1 }) end
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
    local open = q.skip > 0 and get_chunk(q, q.cur)
    if open then
        -- In the middle of an entry the chunk says what the index would.
        open.c = q.cur
        local stop = lease_entry(q, pick, open)
        if stop < open.n then
            q.skip = stop
            return
        end
        q.cur, q.skip = open.c + open.n, 0
    end
    while wants(pick) and pick.parked < PARKED_PER_CALL and q.cur < q.next_seq do
        local rows = redis.call('XRANGE', q.key .. ':cx', q.cur, '+', 'COUNT', batch)
        for _, row in ipairs(rows) do
            if not wants(pick) or pick.parked >= PARKED_PER_CALL then return end
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
    if q.ordered then
        lease_keys(q, pick)
        if pick.takers > 1 then
            local share = ceil(unkeyed(q) / pick.takers)
            pick.left = min(pick.left, pick.count == 0 and max(share, 1) or share)
        end
    end
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

-- Where few messages between others are leased, as the messages of a key are, only theirs are given along: notes the runs of
-- the data that they are, and as their table where each ends in what is given.
local function pick_out(part)
    local set, ends = part.set, part.ends
    local first = max(set.lo - 1, 0)
    local runs, table_of, bytes = {}, {}, 0
    each(set, function(index)
        local start = index > 0 and struct.unpack('<I4', ends, (index - 1 - first) * 4 + 1) or 0
        local stop = struct.unpack('<I4', ends, (index - first) * 4 + 1)
        if runs[#runs] == start then
            runs[#runs] = stop
        else
            runs[#runs + 1] = start
            runs[#runs + 1] = stop
        end
        bytes = bytes + stop - start
        table_of[#table_of + 1] = struct.pack('<I4', bytes)
    end)
    if bytes * 2 > part.to - part.from then return end
    part.runs, part.ends = runs, concat(table_of)
    part.size = #part.ends + bytes
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
    part.set = set
    if set.lo > 0 or set.hi < chunk.n - 1 then
        local ends = redis.call('GETRANGE', payload_key(q, chunk.payload), max(set.lo - 1, 0) * 4, set.hi * 4 + 3)
        local size = #ends
        if size == (set.hi - max(set.lo - 1, 0) + 1) * 4 then
            from = set.lo > 0 and struct.unpack('<I4', ends) or 0
            to = struct.unpack('<I4', ends, size - 3)
            if to > 0 then part.ends, part.from, part.to, part.size = ends, from, to, size + to - from end
            if set.bm and chunk.flags == 0 then pick_out(part) end
        end
    end
    answer[#answer + 1] = struct.pack('<I8c8I2I8I8I1I4I4I2', c, chunk.payload, chunk.n, chunk.ms, chunk.id,
        chunk.flags + (part.runs and PICKED or 0), from, to, #part.redelivered) .. pack_set(set) .. part.redelivered
end

-- Adds what a node reads of a chunk to the answer: the payload, or of its tables and data what the leased messages take.
-- Answers whether it is there.
local function add_payload(q, part, answer)
    local chunk, set, ends = part.chunk, part.set, part.ends
    local name = payload_key(q, chunk.payload)
    local at = #answer
    if not ends then
        local payload = redis.call('GET', name)
        if payload then answer[at + 1] = payload end
        return payload
    end
    local head = chunk.n * 4
    if part.runs then
        local texts = {}
        for run = 1, #part.runs, 2 do
            texts[#texts + 1] = redis.call('GETRANGE', name, head + part.runs[run], head + part.runs[run + 1] - 1)
        end
        answer[at + 1], answer[at + 2] = ends, concat(texts)
        return true
    end
    local gaps = chunk.flags % 2 == 1 and redis.call('GETRANGE', name, head + set.lo * 2, head + set.hi * 2 + 1)
    if gaps then head = head + chunk.n * 2 end
    answer[at + 1] = ends
    if gaps then answer[at + 2] = gaps end
    answer[#answer + 1] = redis.call('GETRANGE', name, head + part.from, head + part.to - 1)
    return true
end

-- Adds the first payloads to the answer while they are small, which spares the node another call. Answers of how many chunks.
local function add_payloads(q, pick, answer)
    local room = INLINE_BYTES
    for at, c in ipairs(pick.order) do
        local part = pick.parts[c]
        local chunk = part.chunk
        room = room - (part.size or chunk.bytes)
        if at > INLINE_CHUNKS or room < 0 or not add_payload(q, part, answer) then return at - 1 end
    end
    return #pick.order
end

function register_waiting(q)
    q.waiting = q.waiting + redis.call('ZADD', q.key .. ':wt', 'NX', q.now, q.node)
end

-- args: header, session, max messages, max bytes, deadline, max in flight, other waiting sessions of the node, '1' when this
-- session waits too if it gets nothing, version of the record that the caller acts on or 0, '1' when one of the others has
-- no call under way, which would say by itself that it waits
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
        parked = 0, takers = 1, parts = {}, order = {} }
    pick.left = q.detached and 0 or min(tonumber(args[3]), max(tonumber(args[6]) - q.out, 0))
    if pick.left > 1 then pick.takers = others + q.waiting + 1 end
    -- Others get their share. Of a key's line they get nothing, so that keys are shared out, not their messages.
    if pick.takers > 1 and not q.ordered then pick.left = min(pick.left, max(ceil(available(q) / pick.takers), 1)) end
    if pick.left > 0 then lease_all(q, pick) end
    local inlined = 0
    if pick.count > 0 then
        q.lease = q.lease + 1
        q.out = q.out + pick.count
        by(q, pick.deadline)
        -- Keys are picked in any order, but one key's messages must leave in theirs.
        if q.ordered then table.sort(pick.order) end
        for _, c in ipairs(pick.order) do close_part(q, pick, c, answer) end
        inlined = add_payloads(q, pick, answer)
    end
    if (pick.count == 0 and args[8] == '1') or args[10] == '1' then register_waiting(q) end
    -- The session comes again at once when there may be more for it.
    if pick.parked >= PARKED_PER_CALL then q.available = true end
    local number = q.lease
    local head, ended, owners = finish(q, pick.count > 0)
    answer[1] = head
    answer[2] = ended
    answer[3] = owners
    answer[4] = struct.pack('<I8I8I4I1I1I1', number, pick.deadline, q.max_attempts, q.once and 1 or 0, q.ordered and 1 or 0, inlined)
    return answer
end
register('landline_lease', lease, 'allow-oom')

end
