--! heartbeat: the holder of a live lease asks for more time.
--! KEYS    due
--! ARGV    root tid id worker token extend_ms progress clock
--! RETURNS OK deadline_ms | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED
--! EFFECTS inprog deadline moved; task.progress when given
--! COST    O(log inprog)
--! FLAGS   allow-oom
--@ include keys, write, now, due, lease, holder
local now = now_ms()
local key = task_key(id)
local task = call('HMGET', key, 'progress', 'queue', 'status', 'lease')
local queue = task[2]
local refused, deadline = refusal(id, queue, task[3], task[4], token, now)
if refused then return { refused } end
local extended = now + tonumber(extend_ms)
-- decided; only writes below
zset_move(queue_key(queue, 'inprog'), id, deadline, extended)
if extended < tonumber(deadline) then visit_by(queue, extended) end
if progress ~= '' then hash_set(key, { 'progress' }, task, 'progress', progress) end
return { 'OK', extended }
