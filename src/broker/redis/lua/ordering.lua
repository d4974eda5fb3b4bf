-- --------------------------------------------------------------------------------------------------------- ordering keys
-- A key with a message outstanding belongs to the session that has it; what the cursor meets of a key it can't give is
-- parked in the key's line. A failed delivery brings the key's later outstanding messages back behind the failed one.

local KEY = '<c8I8c8I4I4'

local function get_key(q, k)
    local key = q.keys[k]
    if key then return key end
    local text = redis.call('HGET', q.key .. ':ky', k)
    key = { owner = ZERO, blocked = 0, offered = NONE, line = 0, out = {}, count = 0 }
    if text then
        local n, at
        key.owner, key.blocked, key.offered, key.line, n, at = struct.unpack(KEY, text)
        for i = 1, n do
            local c, count
            c, count, at = struct.unpack('<I8I4', text, at)
            key.out[i] = { c, count }
            key.count = key.count + count
        end
        key.stored = true
    end
    q.keys[k] = key
    return key
end

local function flush_keys(q)
    local put, gone = {}, {}
    for k, key in pairs(q.keys) do
        if key.dirty then
            if key.count == 0 and key.line == 0 then
                if key.stored then gone[#gone + 1] = k end
            else
                local parts = { struct.pack(KEY, key.owner, key.blocked, key.offered, key.line, #key.out) }
                for i, out in ipairs(key.out) do parts[i + 1] = struct.pack('<I8I4', out[1], out[2]) end
                put[#put + 1] = k
                put[#put + 1] = concat(parts)
            end
        end
    end
    bulk('HSET', q.key .. ':ky', put)
    bulk('HDEL', q.key .. ':ky', gone)
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

local function key_start(q, k, session, c)
    local key = get_key(q, k)
    key.dirty = true
    key.owner = session
    key.count = key.count + 1
    local out = key.out
    local last = out[#out]
    if last and last[1] == c then
        last[2] = last[2] + 1
        return
    end
    local at = #out
    while at > 0 and out[at][1] > c do at = at - 1 end
    if at > 0 and out[at][1] == c then
        out[at][2] = out[at][2] + 1
    else
        table.insert(out, at + 1, { c, 1 })
    end
end

local function key_left(q, key, c)
    key.dirty = true
    for at, out in ipairs(key.out) do
        if out[1] == c then
            out[2] = out[2] - 1
            key.count = key.count - 1
            if out[2] == 0 then table.remove(key.out, at) end
            return
        end
    end
end

local function key_settled(q, k, c)
    local key = get_key(q, k)
    key_left(q, key, c)
    key_changed(q, k, key)
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
    key_left(q, key, c)
    to_line(q, k, key, c, index)
    need_retry(q, c, index).place = 'N'
    local seq = c + index
    local list = {}
    for _, out in ipairs(key.out) do
        if out[1] >= c then list[#list + 1] = out[1] end
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
                    key_left(q, key, later)
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
