--! abandon: end an attempt without a result; the task is ready at once, behind the others of its priority, or is dead.
--! KEYS    due waiting woken events expiry
--! ARGV    root tid id worker token default_backoff dead_retention_ms clock
--! RETURNS PENDING | FAILED 0 | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED
--! EFFECTS inprog -1; attempts +1; events +1; ready +1, or without attempts left:
--! EFFECTS dlq +1 and expiry +1, or ready +1 in the dead letter queue of the policy
--! COST    O(log n)
--! FLAGS   allow-oom
--@ include keys, write, now, due, wake, lease, events, end_attempt, check_lease
local now = now_ms()
local task = call('HMGET', task_key(id), unpack(ATTEMPT_FIELDS))
local status, lease, queue = task[1], task[8], task[11]
local refusal, deadline = check_lease(id, queue, status, lease, worker, token, now)
if refusal then return { refusal } end
-- All checks are done; only writes follow.
local new_status = end_attempt(id, task, deadline, now, 'ABANDONED', '', 0)
write_changes(now)
return { new_status, 0 }
