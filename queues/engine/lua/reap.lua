--! reap: end the attempts in one queue that have an expired lease.
--! KEYS    due waiting woken events expiry
--! ARGV    root queue limit seed default_backoff dead_retention_ms clock
--! RETURNS expired dead next_due_ms
--! EFFECTS inprog -n; delayed +n, or dlq +n and expiry +n, or ready +n in the dead letter queue of the policy;
--! EFFECTS attempts +1 each; events +n
--! COST    O(expired · log n)
--! FLAGS   allow-oom
--@ include keys, write, now, due, wake, lease, events, end_attempt, reap
local now = now_ms()
math.randomseed(tonumber(seed))
local expired, dead = reap_expired(queue, now, limit)
return { expired, dead, refresh_due(queue) or 0 }
