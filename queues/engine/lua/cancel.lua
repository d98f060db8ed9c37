--! cancel: cancel a task that has not ended; a worker that holds it is informed by its next heartbeat.
--! KEYS    ghosts events expiry
--! ARGV    root tid id retention_ms clock
--! RETURNS OK task… | SAME task… | NOT_FOUND | ENDED;
--! RETURNS SAME: the task was cancelled before
--! EFFECTS task -> CANCELLED; delayed -1 or inprog -1; an id in a ready list stays as a ghost and is counted; events +1
--! COST    O(log n); no search for the id in the ready list, whose cost would be the length of the list
--! FLAGS   allow-oom
--@ include keys, write, now, lease, events, task, retention
local now = now_ms()
local key = task_key(id)
local task = call('HMGET', key, 'status', 'ended', 'updated', 'queue', 'priority', 'lease', 'created', 'visible',
  'attempts', 'past', 'awaited')
local status, queue, priority, lease = task[1], task[4], task[5], task[6]
local created, visible, attempts, past, awaited = task[7], task[8], task[9] or 0, task[10] or 0, task[11]
if not belongs_to_tenant(queue) then return { 'NOT_FOUND' } end
if status == 'CANCELLED' then return { 'SAME', unpack(read_task(id)) } end
if status ~= 'PENDING' and status ~= 'IN_PROGRESS' then return { 'ENDED' } end
local index = queue_key(queue, status == 'PENDING' and 'delayed' or 'inprog')
local score = call('ZSCORE', index, id)
local attempt = status == 'IN_PROGRESS' and past + attempts + 1 or 0
-- All checks are done; only writes follow.
hash_set(key, { 'status', 'ended', 'updated' }, task, 'status', 'CANCELLED', 'ended', now, 'updated', now)
if score then
  zset_remove(index, { score, id })
else
  counter_add(ghosts, command_of(queue) .. ':' .. priority, 1)
end
zset_add(expiry, { now + (tonumber(retention_ms) or retention_of(queue)), id })
record_event(id, queue, attempt, 'CANCELLED', 'CANCELLED', attempts, priority, attempt > 0 and lease, created, visible, now)
if awaited then announce_ends({ id }) end
return { 'OK', unpack(read_task(id)) }
