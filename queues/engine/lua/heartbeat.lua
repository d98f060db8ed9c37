--! heartbeat: extend a valid lease.
--! KEYS    due
--! ARGV    root tid id worker token extend_ms progress clock
--! RETURNS OK deadline_ms | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED
--! EFFECTS deadline in inprog changed; task.progress when given
--! COST    O(log inprog)
--! FLAGS   allow-oom
--@ include keys, write, now, due, lease, check_lease
local now = now_ms()
local key = task_key(id)
local task = call('HMGET', key, 'progress', 'queue', 'status', 'lease')
local queue, status, lease = task[2], task[3], task[4]
local refusal, deadline = check_lease(id, queue, status, lease, worker, token, now)
if refusal then return { refusal } end
local extended = now + tonumber(extend_ms)
-- All checks are done; only writes follow.
zset_move(queue_key(queue, 'inprog'), id, deadline, extended)
if extended < tonumber(deadline) then mark_due_by(queue, extended) end
if progress ~= '' then hash_set(key, { 'progress' }, task, 'progress', progress) end
return { 'OK', extended }
