--! undo_replay: turn tasks that a bulk job replayed into dead letters again, unless a worker has claimed them since.
--! KEYS    ghosts events expiry
--! ARGV    root tid job dead_retention_ms clock {id}*
--! RETURNS {OK | NOT_FOUND | CONFLICT}*    OK also if undone before; CONFLICT: claimed, or not replayed by that job
--! EFFECTS dlq +n, expiry +n; the id stays in its ready list as a ghost, counted and marked on the task;
--! EFFECTS task PENDING -> FAILED; events +n
--! COST    O(n · log dlq)
--! FLAGS   allow-oom
--@ include keys, write, now, lease, events, task
local WRITTEN_FIELDS = { 'status', 'attempts', 'past', 'updated', 'job', 'ghost' }
-- The field `job` of a task has this value after the undo, so that the undo can be repeated. The event of the undo is
-- called RECALLED.
local now, undone_mark = now_ms(), 'not ' .. job
local reply, accepted, seen = {}, {}, {}
for i = args_from, #ARGV do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'past', 'updated', 'job', 'ghost', 'queue', 'priority', 'max',
    'created')
  local status, attempts, replayed_by, queue = task[1], tonumber(task[2] or 0), task[5], task[7]
  local answer = 'CONFLICT'
  if not belongs_to_tenant(queue) then
    answer = 'NOT_FOUND'
  elseif replayed_by == undone_mark or seen[id] then
    answer = 'OK'
  elseif replayed_by == job and status == 'PENDING' and attempts == 0 then
    answer, seen[id] = 'OK', true
    accepted[#accepted + 1] = { id, task }
  end
  reply[#reply + 1] = { answer }
end
-- All checks are done; only writes follow.
local dead_entries, expiries = {}, {}
for _, item in ipairs(accepted) do
  local id, task = unpack(item)
  local past, queue, priority, max_attempts, created = task[3] or 0, task[7], task[8], tonumber(task[9]), task[10]
  -- All attempts are used up again: they move back from `past`, to which the replay added them.
  hash_set(task_key(id), WRITTEN_FIELDS, task, 'status', 'FAILED', 'attempts', max_attempts,
    'past', past - max_attempts, 'updated', now, 'job', undone_mark, 'ghost', 1)
  counter_add(ghosts, command_of(queue) .. ':' .. priority, 1)
  record_event(id, queue, 0, 'RECALLED', 'DEAD', max_attempts, priority, nil, created, now, now)
  local entries = dead_entries[queue] or {}
  dead_entries[queue] = entries
  entries[#entries + 1], entries[#entries + 2] = now, id
  expiries[#expiries + 1], expiries[#expiries + 2] = now + dead_retention_ms, id
end
for queue, entries in pairs(dead_entries) do zset_add(queue_key(queue, 'dlq'), entries) end
if #expiries > 0 then zset_add(expiry, expiries) end
return reply
