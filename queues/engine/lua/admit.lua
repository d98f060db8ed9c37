--! admit: count one request against its rate limits.
--! KEYS    due
--! ARGV    limits clock
--! RETURNS 0 | wait_ms
--! EFFECTS one request is charged to each bucket
--! COST    O(1)
--! FLAGS   allow-oom
--@ include write, now, rate_limit
local _ = due -- routes the call to the tenant's slot
local now = now_ms()
local buckets, wait = check_limits(limits, now)
if not buckets then return wait end
charge_buckets(buckets, 1, now)
return 0
