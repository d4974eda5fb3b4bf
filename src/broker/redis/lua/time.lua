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
    if chunk then chunk.noted = first_deadline(chunk.leases) end
    if chunk and #chunk.leases > 0 then
        redis.call('ZADD', q.key .. ':ls', chunk.noted, c)
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
                    q.expired = q.expired + size_of(lease.set)
                end
                for _, lease in ipairs(over) do
                    each(lease.set, function(index) fail(q, chunk, c, index, lease.deadline, false) end)
                    left = left - size_of(lease.set)
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
    return e.n - (gone and size_of(gone) or 0)
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
            chunk.dirty, chunk.noted = true, INFINITE
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

-- Messages that are not in the line of a key.
local function unkeyed(q)
    local fresh = min(max(q.next_seq - q.cur - q.skip, 0), q.unacked)
    return fresh + redis.call('LLEN', q.key .. ':rd')
end

local function available(q)
    return unkeyed(q) + redis.call('LLEN', q.key .. ':kf')
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
