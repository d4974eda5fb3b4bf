-- ---------------------------------------------------------------------------------------------------------------- records
do -- see library.lua

-- All records lie in one slot. A change with an effect on other slots is noted as an intent first, then its effect is
-- carried out, then the record is written and the intent removed. Whoever meets an intent that was left behind carries it
-- out and completes it: every effect may be repeated. So a crash leaves a change that nobody was told about, done or undone.

local INTENT = '<I8I8I1'

local function write_record(key, kind, name, version, body, registered, channel)
    if body then
        redis.call('HSET', key .. ':b:' .. kind, name, struct.pack('<I8', version) .. body)
        redis.call('ZADD', key .. ':n:' .. kind, 0, name)
    else
        redis.call('HDEL', key .. ':b:' .. kind, name)
        redis.call('ZREM', key .. ':n:' .. kind, name)
    end
    if registered ~= '' then
        if sub(registered, 1, 1) == '+' then
            redis.call('HSET', key .. ':q', sub(registered, 2), name)
        else
            redis.call('HDEL', key .. ':q', sub(registered, 2))
        end
    end
    redis.call('PUBLISH', channel, kind .. name)
end

-- args: kind, name, expected version or '' for none, '1' with a body, body, effect or '', channel
local function begin_change(keys, args)
    local key, kind, name = keys[1], args[1], args[2]
    local format = redis.call('HGET', key, 'v')
    if format and format ~= FORMAT then return redis.error_reply('LLFORMAT stored format ' .. format) end
    local pending = redis.call('HGET', key .. ':i', kind .. name)
    if pending then return { 1, pending } end
    local current = redis.call('HGET', key .. ':b:' .. kind, name)
    local version = current and struct.unpack('<I8', current) or nil
    local expected = args[3] ~= '' and tonumber(args[3]) or nil
    if version ~= expected then return redis.error_reply('LLCONFLICT ' .. string.format('%.0f', version or 0)) end
    local next_version = redis.call('HINCRBY', key, 'n', 1)
    if not format then redis.call('HSET', key, 'v', FORMAT) end
    if args[6] == '' then
        write_record(key, kind, name, next_version, args[4] == '1' and args[5] or nil, '', args[7])
        return { 0, next_version }
    end
    local time = redis.call('TIME')
    redis.call('HSET', key .. ':i', kind .. name, struct.pack(INTENT, next_version, time[1], tonumber(args[4]))
        .. struct.pack('<I4', #args[6]) .. args[6] .. args[5])
    return { 0, next_version }
end

-- args: kind, name, version of the intent, queue to register ('+key'), to forget ('-key') or '', channel, '1' to give it up
local function end_change(keys, args)
    local key, kind, name = keys[1], args[1], args[2]
    local pending = redis.call('HGET', key .. ':i', kind .. name)
    if not pending then return 0 end
    local version, _, has_body, at = struct.unpack(INTENT, pending)
    if version ~= tonumber(args[3]) then return 0 end
    local length
    length, at = struct.unpack('<I4', pending, at)
    redis.call('HDEL', key .. ':i', kind .. name)
    if args[6] ~= '1' then
        write_record(key, kind, name, version, has_body == 1 and sub(pending, at + length) or nil, args[4], args[5])
    end
    return 1
end

-- args: kind, prefix, after, limit
local function list(keys, args)
    local key, kind, prefix, after = keys[1], args[1], args[2], args[3]
    local from = '[' .. prefix
    if after ~= '' and after >= prefix then from = '(' .. after end
    local names = redis.call('ZRANGEBYLEX', key .. ':n:' .. kind, from, prefix == '' and '+' or '[' .. prefix .. '\255', 'LIMIT', 0,
        tonumber(args[4]))
    if #names == 0 then return { {}, {} } end
    local bodies = {}
    for at = 1, #names, 1000 do
        local part = redis.call('HMGET', key .. ':b:' .. kind, unpack(names, at, min(at + 999, #names)))
        for _, body in ipairs(part) do bodies[#bodies + 1] = body end
    end
    return { names, bodies }
end

register('landline_begin_change', begin_change)
register('landline_end_change', end_change, 'allow-oom')
register('landline_list', list, 'no-writes')
register('landline_version', function() return 'LANDLINE_VERSION' end, 'no-writes')

end
