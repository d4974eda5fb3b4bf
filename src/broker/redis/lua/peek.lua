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
register('landline_peek', peek, 'no-writes')

end
