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
        put_mask(q, ':gm', c, '*')
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
register('landline_published', published, 'no-writes')

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

register('landline_publish', publish)
register('landline_begin_publish', begin_publish)
register('landline_put', put)
register('landline_put_log', put_log)

end
