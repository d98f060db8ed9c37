--! recall: take back what a job has replayed and nobody has claimed since: dead letters again, with their attempts used up.
--! KEYS    ghosts events expiry
--! ARGV    root tid job dead_retention_ms clock {id}*
--! RETURNS {OK | NOT_FOUND | CONFLICT}*    OK again for what it has taken back; CONFLICT: claimed, or not by that job
--! EFFECTS dlq +n, expiry +n; an id in a ready list stays as a ghost, is counted and noted; task PENDING -> FAILED; events +n
--! COST    O(n · log dlq)
--! FLAGS   allow-oom
--@ include keys, write, now, lease, ended, task
local WRITTEN = { 'status', 'attempts', 'past', 'updated', 'job', 'ghost' }
local now, undone = now_ms(), 'not ' .. job
local reply, accepted, seen = {}, {}, {}
for i = args_from, #ARGV do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'past', 'updated', 'job', 'ghost', 'queue', 'priority', 'max',
    'created')
  local answer = 'CONFLICT'
  if not is_of_tenant(task[7]) then
    answer = 'NOT_FOUND'
  elseif task[5] == undone or seen[id] then
    answer = 'OK'
  elseif task[5] == job and task[1] == 'PENDING' and tonumber(task[2] or 0) == 0 then
    answer, seen[id] = 'OK', true
    accepted[#accepted + 1] = { id, task }
  end
  reply[#reply + 1] = { answer }
end
-- decided; only writes below
local graves, ends = {}, {}
for _, item in ipairs(accepted) do
  local id, task = unpack(item)
  local queue, priority, most = task[7], task[8], tonumber(task[9])
  hash_set(task_key(id), WRITTEN, task, 'status', 'FAILED', 'attempts', most, 'past', (task[3] or 0) - most, 'updated', now,
    'job', undone, 'ghost', 1)
  count_up(ghosts, command_of(queue) .. ':' .. priority, 1)
  record(id, queue, 0, 'RECALLED', 'DEAD', most, priority, nil, task[10], now, now)
  local grave = graves[queue] or {}
  graves[queue] = grave
  grave[#grave + 1], grave[#grave + 2] = now, id
  ends[#ends + 1], ends[#ends + 2] = now + dead_retention_ms, id
end
for queue, grave in pairs(graves) do zset_add(queue_key(queue, 'dlq'), grave) end
if #ends > 0 then zset_add(expiry, ends) end
return reply
