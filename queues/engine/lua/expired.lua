--! expired: the ended tasks of a tenant whose retention is over, the longest over first.
--! KEYS    expiry
--! ARGV    before_ms limit clock
--! RETURNS now_ms {id}*
--! EFFECTS none. before_ms '' = now, and never later than now
--! COST    O(log n + limit)
--! FLAGS   no-writes
--@ include now
local now = now_ms()
local until_ms = before_ms ~= '' and math.min(now, tonumber(before_ms)) or now
return { now, unpack(call('ZRANGEBYSCORE', expiry, '-inf', until_ms, 'LIMIT', 0, limit)) }
