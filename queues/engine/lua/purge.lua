--! purge: remove ended tasks: the task with its answer, indexes, idempotency mapping. Live work is never removed.
--! KEYS    events expiry
--! ARGV    root tid before_ms only_dead clock {id}*
--! RETURNS {1 | 0 | -1}*    0: live, not yet expired, or not dead where only the dead are meant; -1: there is no such task
--! EFFECTS task and mapping deleted; expiry -n, dlq -n; events +1 for each dead letter, which is none any more.
--! EFFECTS before_ms '' = whatever has ended (an operator asks)
--! COST    O(n · log expiry)
--! FLAGS   allow-oom
--@ include keys, write, now, lease, ended
local now = now_ms()
local reply = {}
local gone, doomed = {}, {}
for i = args_from, #ARGV do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'queue', 'status', 'idem', 'attempts', 'priority', 'created')
  local queue, status = task[1], task[2]
  local expires = call('ZSCORE', expiry, id)
  local is_ended = status == 'COMPLETED' or status == 'FAILED' or status == 'CANCELLED'
  local is_theirs = queue and string.sub(queue, 1, #tid + 1) == tid .. ':'
  local is_over = before_ms == '' or (expires and tonumber(expires) <= tonumber(before_ms))
  local dead_since = is_theirs and status == 'FAILED' and call('ZSCORE', queue_key(queue, 'dlq'), id)
  if not queue and expires then gone[#gone + 1] = { expires, id } end
  if is_theirs and is_ended and is_over and (dead_since or only_dead ~= '1') and not doomed[id] then
    doomed[id] = true
    local mapped = task[3] and idem_key(tid, task[3])
    doomed[#doomed + 1] = { id, expires, dead_since, mapped and call('GET', mapped) == id and mapped, task }
    reply[#reply + 1] = 1
  else
    reply[#reply + 1] = (is_theirs and not doomed[id]) and 0 or -1
  end
end
-- decided; only writes below
local keys = {}
for _, entry in ipairs(gone) do zset_remove(expiry, entry) end
for _, item in ipairs(doomed) do
  local id, expires, dead_since, mapped, task = unpack(item, 1, 5)
  if expires then zset_remove(expiry, { expires, id }) end
  if dead_since then
    zset_remove(queue_key(task[1], 'dlq'), { dead_since, id })
    record(id, task[1], 0, 'PURGED', 'GONE', task[4] or 0, task[5], nil, task[6], now, now)
  end
  keys[#keys + 1] = task_key(id)
  if mapped then keys[#keys + 1] = mapped end
end
-- What has no inverse comes last, as one command.
if #keys > 0 then call('DEL', unpack(keys)) end
return reply
