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

-- Takes what is live of `set` out of the chunk's leases of this number, or of any without one. Calls `done` with each lease
-- and part; answers the part of the set that was not live.
local function take(q, c, chunk, number, set, done)
    local kept = {}
    for _, lease in ipairs(chunk.leases) do
        local rest = lease.set
        if set and (not number or lease.lease == number) then
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

local function is_parked(q, c, chunk, index)
    local k = key_of(q, chunk, index)
    return k and redis.call('ZSCORE', q.key .. ':kl:' .. hex(k), struct.pack(PLACE, c, index)) ~= false
end

-- Removes a message that is not under the lease of the token that acknowledges it.
local function remove_elsewhere(q, c, chunk, index)
    local retry = live_retry(q, c + index)
    if retry and retry.place ~= 'L' then
        withdraw(q, chunk, c, index, retry)
    else
        local one = { lo = index, hi = index, count = 1 }
        local elsewhere = take(q, c, chunk, nil, one, function(lease, part)
            end_lease(q, c, lease, part)
            keys_settled(q, c, chunk, part)
        end)
        if elsewhere then
            if retry or not is_parked(q, c, chunk, index) then return end
            leave_line(q, key_of(q, chunk, index), c, index)
        end
    end
    if retry then forget_retry(q, c + index) end
    drop(q, chunk, 1)
end

local function is_fresh(q, c, index)
    return c > q.cur or (c == q.cur and index >= q.skip)
end

-- Removes messages that were given to nobody, as far as the queue knows: the store lost the lease of who acknowledges them.
local function remove_fresh(q, c, chunk, set)
    local rows = redis.call('XRANGE', q.key .. ':cx', c .. '-0', c .. '-0')
    if not rows[1] then return end
    local e, mask = read_entry(rows[1]), mask_of(q, c)
    set = split(set, { lo = 0, hi = e.n - 1, count = e.n })
    if set and mask then
        local _, rest = split(set, mask)
        set = rest
    end
    if not set then return end
    drop(q, chunk or { unacked = unmasked(e, mask), n = e.n, bytes = e.bytes }, size_of(set))
    local name = q.retain and ':mk' or ':gm'
    local before = redis.call('HGET', q.key .. name, c)
    put_mask(q, name, c, pack_set(before and join(read_mask(before), set) or set))
end

-- Whether a message that is not under the token's lease is still there: waiting, under another lease, or fresh.
local function is_unacked(q, c, chunk, index)
    if is_fresh(q, c, index) then return true end
    if not chunk then return false end
    if live_retry(q, c + index) then return true end
    for _, lease in ipairs(chunk.leases) do
        if has(lease.set, index) then return true end
    end
    return is_parked(q, c, chunk, index)
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
            if lease.redelivered then
                each(part, function(index) forget_retry(q, c + index) end)
                if q.once then remember(q, c, number, part) end
            end
            drop(q, chunk, size_of(part))
        end)
    end
    if not rest then return 'D' end
    if not q.once then
        local fresh = {}
        each(rest, function(index)
            if is_fresh(q, c, index) then
                fresh[index] = true
            elseif chunk then
                remove_elsewhere(q, c, chunk, index)
            end
        end)
        if next(fresh) then remove_fresh(q, c, chunk, from_marks(fresh, rest.lo, rest.hi)) end
        return 'D'
    end
    local invalid
    each(rest, function(index)
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

register('landline_acknowledge', settle(acknowledge_group), 'allow-oom')
register('landline_extend', settle(extend_group), 'allow-oom')
register('landline_nack', settle(nack_group), 'allow-oom')
register('landline_release', settle(release_group), 'allow-oom')

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
register('landline_recover', recover_session, 'allow-oom')

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
register('landline_check', settle(check_group, true), 'allow-oom')

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
register('landline_sweep', sweep, 'allow-oom')

end
