-- ---------------------------------------------------------------------------------------------------------------- seeking

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

-- args: header, time
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
    local first = find_entry(q, ms)
    if first then
        q.cur = max(first.c, q.trim)
        recount(q, first)
    else
        q.cur, q.unacked, q.bytes = q.next_seq, 0, 0
    end
    q.skip = 0
    if not q.retain then q.trim = max(q.trim, q.cur) end
    q.lease = q.lease + 1
    q.barrier = q.lease + 1
    q.floor = ms > q.now and ms or 0
    q.available = true
    q.due = q.now
    return { finish(q, true) }
end
register('landline_seek_time', seek_time, 'allow-oom')

-- ---------------------------------------------------------------------------------- seeking beyond the queue's own messages
-- A seek that needs messages of the topic's log or of a snapshot rebuilds the index: the node surveys the queue, writes the
-- missing payloads and a plan, and the plan is carried out at once. Entries that came after the survey stay behind the rest.

-- args: header, '1' to keep what is acknowledged meanwhile until `release_pin`
local function survey(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    if q.detached then return redis.error_reply('LLGONE the queue is detached') end
    advance(q)
    flush_lists(q)
    flush_retries(q)
    flush_chunks(q)
    flush_keys(q)
    local list = {}
    for c, set in pairs(unacked_sets(q)) do list[#list + 1] = struct.pack('<I8', c) .. (set and pack_set(set) or '') end
    local masks = {}
    for at, name in ipairs({ 'gm', 'mk' }) do
        local all = redis.call('HGETALL', q.key .. ':' .. name)
        for i = 1, #all, 2 do
            masks[#masks + 1] = struct.pack('<I8', tonumber(all[i])) .. (at == 1 and 'g' or 'm') .. pack_set(read_mask(all[i + 1]))
        end
    end
    if args[2] == '1' then q.pinned = q.next_seq end
    q.chunks = {}
    local state = struct.pack('<I8I8I4I1I8I1', q.next_seq, q.cur, q.skip, q.retain and 1 or 0, q.retention, q.ordered and 1 or 0)
    local head, ended, owners = finish(q, false)
    return { head, ended, owners, state, list, masks }
end
register('landline_survey', survey, 'allow-oom')

local function release_pin(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
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
register('landline_release_pin', release_pin, 'allow-oom')

-- One step of a plan: `K`eep an own entry, with a mask that is 'n'one, 'm' until the next seek or 'g' for good; or `I`mport.
local function plan_step(q, text, moved)
    local kind, at = sub(text, 1, 1), 2
    if kind == 'N' then return nil end
    local e
    if kind == 'K' then
        local c, how
        c, how, at = struct.unpack('<I8c1', text, at)
        local rows = redis.call('XRANGE', q.key .. ':cx', c, c)
        if not rows[1] then return end -- acknowledged meanwhile, and not kept
        e = read_entry(rows[1])
        moved[c] = true
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
local function place(q, e)
    local c = q.next_seq
    q.next_seq = c + e.n
    e.before = q.total
    q.total = q.total + e.bytes
    q.stored = q.stored + e.n
    local unacked = e.n
    if e.mask then
        redis.call('HSET', q.key .. (e.how == 'g' and ':gm' or ':mk'), c, pack_set(e.mask))
        q.masked = max(q.masked, c)
        unacked = unmasked(e, e.mask)
    end
    q.unacked = q.unacked + unacked
    q.bytes = q.bytes + floor(e.bytes * unacked / e.n)
    redis.call('XADD', q.key .. ':cn', c .. '-0', 'd',
        struct.pack(ENTRY, e.payload, e.n, e.bytes, e.ms, e.id, e.flags, e.before, #e.keys) .. e.keys)
end

-- Carries out a plan. args: header, end of the survey, time that messages to come must have, or 0, the plan's list
local function seek_plan(keys, args)
    local q, err = open_at(keys[1], args[1])
    if not q then return err end
    local plan = q.key .. ':sg:' .. args[4]
    if q.detached then return redis.error_reply('LLGONE the queue is detached') end
    -- Without a plan this is the repetition of a call that was carried out.
    if redis.call('EXISTS', plan) == 0 then return { finish(q, false) } end
    advance(q)
    flush_lists(q)
    flush_retries(q)
    flush_chunks(q)
    flush_keys(q)
    drop_deliveries(q)
    local surveyed, moved = tonumber(args[2]), {}
    redis.call('UNLINK', q.key .. ':cn')
    q.used, q.floor, q.masked, q.stored, q.unacked, q.bytes = q.now, tonumber(args[3]), 0, 0, 0, 0
    local first = q.next_seq
    local gone = redis.call('HGETALL', q.key .. ':gm')
    redis.call('UNLINK', q.key .. ':gm')
    for from = 0, redis.call('LLEN', plan) - 1, 500 do
        for _, text in ipairs(redis.call('LRANGE', plan, from, from + 499)) do
            local e = plan_step(q, text, moved)
            if e then place(q, e) end
        end
    end
    local later = {}
    for at = 1, #gone, 2 do later[tonumber(gone[at])] = gone[at + 1] end
    local from = 0
    while true do
        local rows = redis.call('XRANGE', q.key .. ':cx', from, '+', 'COUNT', 500)
        for _, row in ipairs(rows) do
            local e = read_entry(row)
            from = e.c + e.n
            if e.c >= surveyed and e.c < first then
                if later[e.c] then e.mask, e.how = read_mask(later[e.c]), 'g' end
                place(q, e)
            elseif not moved[e.c] then
                redis.call('UNLINK', payload_key(q, e.payload))
            end
        end
        if #rows < 500 then break end
    end
    redis.call('UNLINK', q.key .. ':cx', plan)
    if redis.call('EXISTS', q.key .. ':cn') == 1 then redis.call('RENAME', q.key .. ':cn', q.key .. ':cx') end
    q.cur, q.skip, q.trim, q.holes, q.pinned = first, 0, first, first, 0
    q.lease = q.lease + 1
    q.barrier = q.lease + 1
    q.available = true
    q.due = q.now
    return { finish(q, true) }
end
register('landline_seek_plan', seek_plan)

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
register('landline_open_snapshot', open_snapshot)

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
register('landline_drop_snapshot', drop_snapshot, 'allow-oom')

-- Answers retention, whether there are snapshots, and the boundary of one. args: header, snapshot or ''
local function topic_info(keys, args)
    local t = read_topic(keys[1], args[1])
    if not t then return { 0, 0, '' } end
    return { t.retention, t.snapshots, args[2] ~= '' and redis.call('HGET', t.key .. ':sns', args[2]) or '' }
end
register('landline_topic_info', topic_info, 'no-writes')
