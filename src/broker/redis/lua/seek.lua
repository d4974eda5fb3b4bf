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
        if (live and size_of(live) or 0) < chunk.unacked and q.ordered and chunk.keys ~= '' then
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
                put_mask(q, ':gm', e.c, '*')
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
                put_mask(q, ':gm', c, pack_set(gone))
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
register('landline_seek_time', seek_time, 'allow-oom')

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
register('landline_survey', survey, 'allow-oom')

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
register('landline_release_pin', release_pin, 'allow-oom')

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
register('landline_seek_part', seek_part)

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
register('landline_seek_switch', seek_switch)

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
register('landline_seek_tidy', seek_tidy, 'allow-oom')

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

end
