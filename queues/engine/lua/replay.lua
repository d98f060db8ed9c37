--! replay: bring dead letters back in line, with all their attempts before them.
--! KEYS    expiry waiting woken
--! ARGV    root tid clock {id spec}*
--! RETURNS {OK task… | NOT_FOUND | NOT_DEAD}*
--! EFFECTS dlq -n, expiry -n, ready +n; task FAILED -> PENDING, attempts 0, past += attempts; spec replaced when given
--! COST    O(n · log dlq)
--! FLAGS   allow-oom
--@ include keys, write, now, wake, task
local WRITTEN = { 'status', 'attempts', 'past', 'visible', 'updated', 'spec' }
local now = now_ms()
local reply, accepted, seen = {}, {}, {}
for i = args_from, #ARGV, 2 do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'past', 'visible', 'updated', 'spec', 'queue', 'priority')
  local queue = task[7]
  local dead_since = is_of_tenant(queue) and call('ZSCORE', queue_key(queue, 'dlq'), id)
  if not is_of_tenant(queue) then
    reply[#reply + 1] = { 'NOT_FOUND' }
  elseif not dead_since or seen[id] then
    reply[#reply + 1] = { 'NOT_DEAD' }
  else
    seen[id] = true
    reply[#reply + 1] = { 'OK', id }
    accepted[#accepted + 1] = { i, task, dead_since, call('ZSCORE', expiry, id) }
  end
end
-- decided; only writes below
for _, item in ipairs(accepted) do
  local i, task, dead_since, expires = unpack(item)
  local id, queue, priority = ARGV[i], task[7], task[8]
  hash_set(task_key(id), WRITTEN, task, 'status', 'PENDING', 'attempts', 0, 'past', (task[3] or 0) + (task[2] or 0),
    'visible', now, 'updated', now, 'spec', ARGV[i + 1] ~= '' and ARGV[i + 1] or task[6])
  zset_remove(queue_key(queue, 'dlq'), { dead_since, id })
  if expires then zset_remove(expiry, { expires, id }) end
  if push(ready_key(queue, priority), { id }) == 1 then woke(queue, now) end
end
for n, answer in ipairs(reply) do
  if answer[1] == 'OK' then reply[n] = { 'OK', unpack(shown(answer[2])) } end
end
return reply
