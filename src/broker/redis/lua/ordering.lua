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

local function copy_key(key)
    local out = {}
    for at = 1, #key.out do out[at] = key.out[at] end
    return { owner = key.owner, blocked = key.blocked, offered = key.offered, line = key.line, out = out, count = key.count,
        stored = key.stored, dirty = key.dirty }
end

-- The key's state, in a table of its own.
local function get_key(q, k)
    local key = q.keys[k]
    if key and not key.shared then return key end
    if key then
        key = copy_key(key)
    else
        local text = redis.call('HGET', q.key .. ':ky', k)
        key = text and read_key(text) or fresh_key()
    end
    q.keys[k] = key
    return key
end

-- Most keys of a chunk are in the same state, and go from there to the same next one. They share its table, which is never
-- changed, as long as none has a line and none is blocked.
local function shared_key(q, text)
    local name = text or ''
    local key = q.same[name]
    if not key then
        key = text and read_key(text) or fresh_key()
        if key.line > 0 or key.blocked > 0 then return key end
        key.shared = true
        q.same[name] = key
    end
    return key
end

-- Reads the keys of a set of a chunk's messages in one go.
local function load_keys(q, chunk, set)
    local keys, missing = q.keys, {}
    if #chunk.keys == 8 then
        get_key(q, chunk.keys)
        return
    end
    local seen, list = {}, 0
    each(set, function(index)
        local k = sub(chunk.keys, index * 8 + 1, index * 8 + 8)
        if not keys[k] and not seen[k] and k ~= ZERO then
            seen[k] = true
            list = list + 1
            missing[list] = k
        end
    end)
    for from = 1, list, 1000 do
        local last = min(from + 999, list)
        local texts = redis.call('HMGET', q.key .. ':ky', unpack(missing, from, last))
        for at, text in ipairs(texts) do keys[missing[from + at - 1]] = shared_key(q, text) end
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
    local put, gone, at = {}, {}, 0
    for k, key in pairs(q.keys) do
        if key.dirty then
            if key.count == 0 and key.line == 0 then
                if key.stored then gone[#gone + 1] = k end
            else
                local text = key.text
                if not text then
                    text = pack_key(key)
                    if key.shared then key.text = text end
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

-- The same for one message, and the session of the call.
local function key_starts(q, k, key, session, c)
    if not key.shared then return key_start(key, session, c, 1) end
    local after = key.started
    if not after or key.started_in ~= c then
        after = copy_key(key)
        after.shared = true
        key_start(after, session, c, 1)
        key.started, key.started_in = after, c
    end
    q.keys[k] = after
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
        key_left(key, c, size_of(set))
        key_changed(q, chunk.keys, key)
        return
    end
    load_keys(q, chunk, set)
    local keys, counts, list = q.keys, {}, {}
    each(set, function(index)
        local k = sub(chunk.keys, index * 8 + 1, index * 8 + 8)
        local key = keys[k]
        if not key then return end -- a message without a key
        if key.shared then
            local after = key.left
            if not after or key.left_of ~= c then
                after = copy_key(key)
                after.shared = true
                key_left(after, c, 1)
                key_changed(q, k, after)
                key.left, key.left_of = after, c
            end
            keys[k] = after
            return
        end
        local count = counts[k]
        if not count then list[#list + 1] = k end
        counts[k] = (count or 0) + 1
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
