--! nack: end an attempt as failed; the task is retried after delay_ms or else its backoff, or is dead.
--! KEYS    due waiting woken events expiry
--! ARGV    root tid id worker token delay_ms reason seed default_backoff dead_retention_ms clock
--! RETURNS PENDING | FAILED delay_ms | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED
--! EFFECTS inprog -1; attempts +1; events +1; delayed +1, or without attempts left:
--! EFFECTS dlq +1 and expiry +1, or ready +1 in the dead letter queue of the policy
--! COST    O(log n)
--! FLAGS   allow-oom
--@ include keys, write, now, due, wake, lease, events, end_attempt, check_lease
local now = now_ms()
local task = call('HMGET', task_key(id), unpack(ATTEMPT_FIELDS))
local status, lease, queue = task[1], task[8], task[11]
local refusal, deadline = check_lease(id, queue, status, lease, worker, token, now)
if refusal then return { refusal } end
math.randomseed(tonumber(seed))
-- All checks are done; only writes follow.
local new_status, delay = end_attempt(id, task, deadline, now, 'NACKED', reason, tonumber(delay_ms))
write_changes(now)
return { new_status, delay }
