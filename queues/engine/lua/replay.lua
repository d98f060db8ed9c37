--! replay: make dead letters ready again, with 0 attempts used.
--! KEYS    ghosts events expiry waiting woken
--! ARGV    root tid job clock {id spec}*
--! RETURNS {OK task… | NOT_FOUND | NOT_DEAD}*;
--! RETURNS for a bulk job {OK | NOT_FOUND | NOT_DEAD}*, with OK also if it has replayed the task before
--! EFFECTS dlq -n, expiry -n, ready +n; task FAILED -> PENDING, attempts 0, past += attempts; spec replaced when given;
--! EFFECTS events +n; task.job = the job that replayed it last, so that a job can repeat a call whose reply was lost
--! COST    O(n · log dlq)
--! FLAGS   allow-oom
--@ include keys, write, now, wake, task, lease, events
local WRITTEN_FIELDS = { 'status', 'attempts', 'past', 'visible', 'updated', 'spec', 'job', 'ghost' }
local now = now_ms()
local reply, accepted, seen = {}, {}, {}
for i = args_from, #ARGV, 2 do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'past', 'visible', 'updated', 'spec', 'job', 'ghost',
    'queue', 'priority', 'created')
  local replayed_by, queue = task[7], task[9]
  local dead_since = belongs_to_tenant(queue) and call('ZSCORE', queue_key(queue, 'dlq'), id)
  if not belongs_to_tenant(queue) then
    reply[#reply + 1] = { 'NOT_FOUND' }
  elseif job ~= '' and (replayed_by == job or seen[id]) then
    reply[#reply + 1] = { 'OK' }
  elseif not dead_since or seen[id] then
    reply[#reply + 1] = { 'NOT_DEAD' }
  else
    seen[id] = true
    reply[#reply + 1] = { 'OK', job == '' and id or nil }
    accepted[#accepted + 1] = { i, task, dead_since, call('ZSCORE', expiry, id) }
  end
end
-- All checks are done; only writes follow.
local dead_entries, expiries, ready_lists = {}, {}, {}
for _, item in ipairs(accepted) do
  local i, task, dead_since, expires = unpack(item)
  local attempts, past, is_ghost = task[2] or 0, task[3] or 0, task[8]
  local queue, priority, created = task[9], task[10], task[11]
  local id, new_spec = ARGV[i], ARGV[i + 1]
  local key, spec = task_key(id), new_spec ~= '' and new_spec or task[6]
  hash_set(key, WRITTEN_FIELDS, task, 'status', 'PENDING', 'attempts', 0,
    'past', past + attempts, 'visible', now, 'updated', now, 'spec', spec, 'job', job)
  if job == '' then call('HDEL', key, 'job') end
  record_event(id, queue, 0, 'REPLAYED', 'PENDING', 0, priority, nil, created, now, now)
  -- Collected, so that a thousand tasks cost one command per index.
  local entries, list = dead_entries[queue] or {}, ready_lists[queue] or {}
  dead_entries[queue], ready_lists[queue] = entries, list
  entries[#entries + 1], entries[#entries + 2] = dead_since, id
  if expires then expiries[#expiries + 1], expiries[#expiries + 2] = expires, id end
  list[priority] = list[priority] or {}
  -- The id of an undone replay is still in the ready list, so it is not pushed again. Otherwise the list would have it
  -- once more after a claim has taken it, and the task could be claimed during the delay of its next retry.
  if is_ghost then
    call('HDEL', key, 'ghost')
    counter_add(ghosts, command_of(queue) .. ':' .. priority, -1)
  else
    table.insert(list[priority], id)
  end
end
if #expiries > 0 then zset_remove(expiry, expiries) end
for queue, entries in pairs(dead_entries) do
  zset_remove(queue_key(queue, 'dlq'), entries)
  for priority, ids in pairs(ready_lists[queue]) do
    if #ids == 0 or push(ready_key(queue, priority), ids) == #ids then wake_waiters(queue, now) end
  end
end
for n, item in ipairs(reply) do
  local id = item[2]
  if id then reply[n] = { 'OK', unpack(read_task(id)) } end
end
return reply
