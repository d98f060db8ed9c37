--! purge: delete ended tasks with their answers, index entries and idempotency mappings; other tasks are kept.
--! KEYS    events expiry
--! ARGV    root tid before_ms only_dead clock {id}*
--! RETURNS {1 | 0 | -1}*    1: deleted; 0: not ended, not expired, or not dead although only_dead is 1; -1: not found
--! EFFECTS task and mapping deleted; expiry -n, dlq -n; events +1 for each dead letter; expiry -1 for a missing task;
--! EFFECTS before_ms '': every ended task, also before its retention has expired
--! COST    O(n · log expiry)
--! FLAGS   allow-oom
--@ include keys, write, now, lease, events
local now = now_ms()
local reply = {}
local missing, removed = {}, {} -- missing: entries of `expiry` without a task
for i = args_from, #ARGV do
  local id = ARGV[i]
  local task = call('HMGET', task_key(id), 'queue', 'status', 'idem', 'attempts', 'priority', 'created')
  local queue, status, digest = task[1], task[2], task[3]
  local expires = call('ZSCORE', expiry, id)
  local is_ended = status == 'COMPLETED' or status == 'FAILED' or status == 'CANCELLED'
  local is_own = queue and string.sub(queue, 1, #tid + 1) == tid .. ':'
  local is_expired = before_ms == '' or (expires and tonumber(expires) <= tonumber(before_ms))
  local dead_since = is_own and status == 'FAILED' and call('ZSCORE', queue_key(queue, 'dlq'), id)
  if not queue and expires then missing[#missing + 1] = { expires, id } end
  if is_own and is_ended and is_expired and (dead_since or only_dead ~= '1') and not removed[id] then
    removed[id] = true
    local mapping = digest and idem_key(tid, digest)
    removed[#removed + 1] = { id, expires, dead_since, mapping and call('GET', mapping) == id and mapping, task }
    reply[#reply + 1] = 1
  else
    reply[#reply + 1] = (is_own and not removed[id]) and 0 or -1
  end
end
-- All checks are done; only writes follow.
local keys = {}
for _, entry in ipairs(missing) do zset_remove(expiry, entry) end
for _, item in ipairs(removed) do
  local id, expires, dead_since, mapping, task = unpack(item, 1, 5)
  if expires then zset_remove(expiry, { expires, id }) end
  if dead_since then
    local queue, attempts, priority, created = task[1], task[4], task[5], task[6]
    zset_remove(queue_key(queue, 'dlq'), { dead_since, id })
    record_event(id, queue, 0, 'PURGED', 'GONE', attempts or 0, priority, nil, created, now, now)
  end
  keys[#keys + 1] = task_key(id)
  if mapping then keys[#keys + 1] = mapping end
end
-- DEL has no inverse, so it comes last, as one command.
if #keys > 0 then call('DEL', unpack(keys)) end
return reply
