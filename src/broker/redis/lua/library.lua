-- The function library. One file set, loaded as a whole: `library.lua` first, then the others in the order of library.rs.
--
-- Rules that hold throughout:
--   * every function touches the keys of one slot only, and takes the time from this server;
--   * a function reads what it needs, changes tables in memory, and writes everything back in `flush`, so the number of
--     commands grows with the chunks touched, not with the messages;
--   * message payloads never pass through here;
--   * numbers are doubles: everything stays below 2^53; opaque ids are strings of 8 bytes;
--   * a function of Lua has room for 200 local names, and the library is one: a part whose names the later ones don't need
--     is a block, and names what they do need before it.

local FORMAT = '1'
local INFINITE = 9007199254740991
-- A queue's pin that is larger holds all entries, until the time by which it is larger.
local PINNED = 4503599627370496
-- An acknowledgement of a redelivered message is remembered this long, because clients repeat one for up to 10 minutes.
local SETTLED_MS = 600000
-- Messages one woken session is expected to take.
local MESSAGES_PER_WAKE = 100
-- Due messages that one call handles: about 1 ms of server time.
local DUE_PER_CALL = 200
-- Moved deadlines are rounded up to this, so that extensions of one lease fall together again.
local SPAN_MS = 50
-- Lease numbers left out after data loss, more than were given since the last write that survived.
local LEASE_GAP = 1048576

-- Redis 7.0 gives a library nothing of the standard library while it is loaded, so this is filled in by the first call.
local ZERO, NONE
local floor, ceil, min, max, byte, sub, char, concat
-- Bits of a byte: how many are set, the lowest and the highest.
local POP, LOW, HIGH = {}, {}, {}
-- The two hexadecimal digits of a byte.
local HEX = {}

local function set_up()
    floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
    byte, sub, char, concat = string.byte, string.sub, string.char, table.concat
    ZERO, NONE = string.rep('\0', 8), string.rep('\255', 8)
    for value = 0, 255 do
        local rest, count, at = value, 0, 0
        while rest > 0 do
            if rest % 2 == 1 then
                count = count + 1
                LOW[value] = LOW[value] or at
                HIGH[value] = at
            end
            rest = floor(rest / 2)
            at = at + 1
        end
        POP[value] = count
        HEX[value] = string.format('%02x', value)
    end
end

-- Registers a function: `flags` says whether it writes, and whether it may where memory has run out.
local function register(name, callback, flag)
    redis.register_function {
        function_name = name,
        callback = function(keys, args)
            if not floor then set_up() end
            return callback(keys, args)
        end,
        flags = flag and { flag } or {},
    }
end

local function bulk(command, key, list)
    local count, at = #list, 1
    while at <= count do
        local last = min(at + 999, count)
        redis.call(command, key, unpack(list, at, last))
        at = last + 1
    end
end

-- Of 4 or 8 bytes.
local function hex(text)
    local a, b, c, d, e, f, g, h = byte(text, 1, 8)
    local head = HEX[a] .. HEX[b] .. HEX[c] .. HEX[d]
    return e and head .. HEX[e] .. HEX[f] .. HEX[g] .. HEX[h] or head
end

-- Redis writes numbers with 17 digits of precision, which takes long. Whole numbers need less.
local function text_of(number)
    return string.format('%d', number)
end

-- The time. `set` is 0, or a test's own time.
local function clock(set, last)
    if set > 0 then return max(set, last or 0) end
    local time = redis.call('TIME')
    return max(time[1] * 1000 + floor(time[2] / 1000), last or 0)
end

-- ------------------------------------------------------------------------------------------------------- sets of messages
-- A set of a chunk's messages: from index `lo` to `hi`, all of them, or those with a bit in the string `bm` (from index 0).

local function set_byte(set, at)
    if set.bm then return byte(set.bm, at + 1) or 0 end
    local first, last = at * 8, at * 8 + 7
    if last < set.lo or first > set.hi then return 0 end
    local mask = 255
    if first < set.lo then mask = bit.band(bit.lshift(mask, set.lo - first), 255) end
    if last > set.hi then mask = bit.band(mask, bit.rshift(255, last - set.hi)) end
    return mask
end

local function from_bytes(bytes, last)
    local count, lo, hi = 0, nil, nil
    for at = 0, last do
        local value = bytes[at] or 0
        if value > 0 then
            count = count + POP[value]
            lo = lo or at * 8 + LOW[value]
            hi = at * 8 + HIGH[value]
        end
    end
    if count == 0 then return nil end
    local bm
    if count ~= hi - lo + 1 then
        local text = {}
        for at = 0, floor(hi / 8) do text[at + 1] = char(bytes[at] or 0) end
        bm = concat(text)
    end
    return { lo = lo, hi = hi, bm = bm, count = count }
end

-- Answers what of `a` is also in `b`, and what is not; nil stands for nothing.
local function split(a, b)
    if b.lo > a.hi or b.hi < a.lo then return nil, a end
    if a.lo == b.lo and a.hi == b.hi and a.bm == b.bm then return a, nil end
    if not b.bm and b.lo <= a.lo and b.hi >= a.hi then return a, nil end
    local both, rest = {}, {}
    local last = floor(a.hi / 8)
    for at = floor(a.lo / 8), last do
        local x, y = set_byte(a, at), set_byte(b, at)
        local z = bit.band(x, y)
        both[at] = z
        rest[at] = x - z
    end
    return from_bytes(both, last), from_bytes(rest, last)
end

local function join(a, b)
    local bytes, last = {}, floor(max(a.hi, b.hi) / 8)
    for at = 0, last do bytes[at] = bit.bor(set_byte(a, at), set_byte(b, at)) end
    return from_bytes(bytes, last)
end

local function from_marks(marks, lo, hi)
    local bytes = {}
    for index in pairs(marks) do
        local at = floor(index / 8)
        bytes[at] = (bytes[at] or 0) + 2 ^ (index % 8)
    end
    return from_bytes(bytes, floor(hi / 8))
end

local function each(set, visit)
    if not set.bm then
        for index = set.lo, set.hi do visit(index) end
        return
    end
    for at = floor(set.lo / 8), floor(set.hi / 8) do
        local value, index = byte(set.bm, at + 1) or 0, at * 8
        while value > 0 do
            local low = LOW[value]
            visit(index + low)
            value = value - 2 ^ low
        end
    end
end

local function has(set, index)
    if index < set.lo or index > set.hi then return false end
    if not set.bm then return true end
    return floor((byte(set.bm, floor(index / 8) + 1) or 0) / 2 ^ (index % 8)) % 2 == 1
end

local function pack_set(set)
    local bm = set.bm
    if not bm then return struct.pack('<I2I2I2', set.lo, set.hi, 0) end
    return struct.pack('<I2I2I2', set.lo, set.hi, #bm) .. bm
end

local function unpack_set(text, at)
    local lo, hi, length, next = struct.unpack('<I2I2I2', text, at)
    if length == 0 then return { lo = lo, hi = hi, count = hi - lo + 1, bm = nil }, next end
    return { lo = lo, hi = hi, count = nil, bm = sub(text, next, next + length - 1) }, next + length
end

-- How many messages a set has. Most that are read are not asked for it.
local function size_of(set)
    if not set.count then
        local count = 0
        for at = floor(set.lo / 8) + 1, #set.bm do count = count + POP[byte(set.bm, at)] end
        set.count = count
    end
    return set.count
end
