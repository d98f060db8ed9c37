--! expired: list the ended tasks of a tenant whose retention has expired, oldest first.
--! KEYS    expiry
--! ARGV    before_ms limit clock
--! RETURNS now_ms {id}*; before_ms limits the expiry times, and '' means now
--! EFFECTS none
--! COST    O(log n + limit)
--! FLAGS   no-writes
--@ include now
local now = now_ms()
local until_ms = before_ms ~= '' and math.min(now, tonumber(before_ms)) or now
return { now, unpack(call('ZRANGEBYSCORE', expiry, '-inf', until_ms, 'LIMIT', 0, limit)) }
