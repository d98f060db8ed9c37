--! purge: remove ended tasks: the task with its answer, indexes, idempotency mapping. Live work is never removed.
--! KEYS    expiry
--! ARGV    root tid before_ms {id}*
--! RETURNS {1 | 0}*    0: unknown, live, or not yet expired
--! EFFECTS task and mapping deleted; expiry -n, dlq -n. before_ms '' = whatever has ended (an operator asks)
--! COST    O(n · log expiry)
--! FLAGS   allow-oom
--@ include keys, write
local reply = {}
local gone, doomed = {}, {}
for i = args_from, #ARGV do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'queue', 'status', 'idem')
  local queue, status = task[1], task[2]
  local expires = call('ZSCORE', expiry, id)
  local is_ended = status == 'COMPLETED' or status == 'FAILED' or status == 'CANCELLED'
  local is_theirs = queue and string.sub(queue, 1, #tid + 1) == tid .. ':'
  local is_over = before_ms == '' or (expires and tonumber(expires) <= tonumber(before_ms))
  if not queue and expires then gone[#gone + 1] = { expires, id } end
  if queue and is_ended and is_theirs and is_over and not doomed[id] then
    doomed[id] = true
    local mapped = task[3] and idem_key(tid, task[3])
    doomed[#doomed + 1] = { id, expires, queue, call('ZSCORE', queue_key(queue, 'dlq'), id),
      mapped and call('GET', mapped) == id and mapped }
    reply[#reply + 1] = 1
  else
    reply[#reply + 1] = 0
  end
end
-- decided; only writes below
local keys = {}
for _, entry in ipairs(gone) do zset_remove(expiry, entry) end
for _, task in ipairs(doomed) do
  local id, expires, queue, dead_since, mapped = unpack(task, 1, 5)
  if expires then zset_remove(expiry, { expires, id }) end
  if dead_since then zset_remove(queue_key(queue, 'dlq'), { dead_since, id }) end
  keys[#keys + 1] = task_key(id)
  if mapped then keys[#keys + 1] = mapped end
end
-- What has no inverse comes last, as one command.
if #keys > 0 then call('DEL', unpack(keys)) end
return reply
