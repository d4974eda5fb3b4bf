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

register('landline_open_topic', open_topic, 'allow-oom')
register('landline_close_topic', close_topic, 'allow-oom')
register('landline_attach', attach, 'allow-oom')
register('landline_route', route, 'no-writes')

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
register('landline_renew_queue', renew_queue, 'allow-oom')

-- The same for a topic, where the route's version tells it.
local function renew_topic(keys, args)
    local t, err = read_topic(keys[1], args[1])
    if not t then return err end
    t.version = t.version + 1
    write_topic(t)
    return 'OK'
end
register('landline_renew_topic', renew_topic, 'allow-oom')

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
register('landline_trim', trim, 'allow-oom')

register('landline_open_queue', open_queue, 'allow-oom')
register('landline_detach_queue', detach_queue, 'allow-oom')
register('landline_purge', purge, 'allow-oom')

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

register('landline_take_dead', take_dead, 'allow-oom')
register('landline_settle_dead', settle_dead, 'allow-oom')

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
register('landline_stats', stats, 'allow-oom')

end
