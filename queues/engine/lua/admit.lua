--! admit: count one request against its rate limits.
--! KEYS    due
--! ARGV    limits clock
--! RETURNS 0 | wait_ms
--! EFFECTS the buckets pay for one more
--! COST    O(1)
--! FLAGS   allow-oom
--@ include write, now, limit
local _ = due -- routes the call to the tenant's slot
local now = now_ms()
local buckets, wait = admitted(limits, now)
if not buckets then return wait end
charge(buckets, 1, now)
return 0
