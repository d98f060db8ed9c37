--! reap: give back the tasks of one queue whose lease is over.
--! KEYS    due waiting woken events expiry
--! ARGV    root queue limit seed default_backoff dead_retention_ms clock
--! RETURNS expired dead next_due_ms
--! EFFECTS inprog -n; delayed +n or dlq +n; attempts +1 each; events +n
--! COST    O(expired · log n), whatever is in progress
--! FLAGS   allow-oom
--@ include keys, write, now, due, wake, lease, ended, give_back, reap
local now = now_ms()
math.randomseed(tonumber(seed))
local expired, dead = reap_expired(queue, now, limit)
return { expired, dead, reschedule(queue) or 0 }
