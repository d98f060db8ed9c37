--! replay: bring dead letters back in line, with all their attempts before them.
--! KEYS    ghosts events expiry waiting woken
--! ARGV    root tid job clock {id spec}*
--! RETURNS {OK task… | NOT_FOUND | NOT_DEAD}*    for a job {OK | NOT_FOUND | NOT_DEAD}*: OK again for what it has replayed
--! EFFECTS dlq -n, expiry -n, ready +n; task FAILED -> PENDING, attempts 0, past += attempts; spec replaced when given;
--! EFFECTS events +n; a task remembers the job that replayed it last, so a job that lost our answer may ask again
--! COST    O(n · log dlq)
--! FLAGS   allow-oom
--@ include keys, write, now, wake, task, lease, ended
local WRITTEN = { 'status', 'attempts', 'past', 'visible', 'updated', 'spec', 'job', 'ghost' }
local now = now_ms()
local reply, accepted, seen = {}, {}, {}
for i = args_from, #ARGV, 2 do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'past', 'visible', 'updated', 'spec', 'job', 'ghost',
    'queue', 'priority', 'created')
  local queue = task[9]
  local dead_since = is_of_tenant(queue) and call('ZSCORE', queue_key(queue, 'dlq'), id)
  if not is_of_tenant(queue) then
    reply[#reply + 1] = { 'NOT_FOUND' }
  elseif job ~= '' and (task[7] == job or seen[id]) then
    reply[#reply + 1] = { 'OK' }
  elseif not dead_since or seen[id] then
    reply[#reply + 1] = { 'NOT_DEAD' }
  else
    seen[id] = true
    reply[#reply + 1] = { 'OK', job == '' and id or nil }
    accepted[#accepted + 1] = { i, task, dead_since, call('ZSCORE', expiry, id) }
  end
end
-- decided; only writes below
local buried, ends, lines = {}, {}, {}
for _, item in ipairs(accepted) do
  local i, task, dead_since, expires = unpack(item)
  local id, queue, priority = ARGV[i], task[9], task[10]
  local key, spec = task_key(id), ARGV[i + 1] ~= '' and ARGV[i + 1] or task[6]
  hash_set(key, WRITTEN, task, 'status', 'PENDING', 'attempts', 0, 'past', (task[3] or 0) + (task[2] or 0), 'visible', now,
    'updated', now, 'spec', spec, 'job', job)
  if job == '' then call('HDEL', key, 'job') end
  record(id, queue, 0, 'REPLAYED', 'PENDING', 0, priority, nil, task[11], now, now)
  -- Gathered, so that a thousand tasks cost one command an index.
  local grave, line = buried[queue] or {}, lines[queue] or {}
  buried[queue], lines[queue] = grave, line
  grave[#grave + 1], grave[#grave + 2] = dead_since, id
  if expires then ends[#ends + 1], ends[#ends + 2] = expires, id end
  line[priority] = line[priority] or {}
  if task[8] then -- recalled once, its id still stands in line: twice, it could be taken before its time
    call('HDEL', key, 'ghost')
    count_up(ghosts, command_of(queue) .. ':' .. priority, -1)
  else
    table.insert(line[priority], id)
  end
end
if #ends > 0 then zset_remove(expiry, ends) end
for queue, grave in pairs(buried) do
  zset_remove(queue_key(queue, 'dlq'), grave)
  for priority, ids in pairs(lines[queue]) do
    if #ids == 0 or push(ready_key(queue, priority), ids) == #ids then woke(queue, now) end
  end
end
for n, answer in ipairs(reply) do
  if answer[2] then reply[n] = { 'OK', unpack(shown(answer[2])) } end
end
return reply
