-- Makes the due tasks of a queue ready, each behind the others of its priority. Returns their number.
local function promote_due(queue, now, limit)
  local entries = call('ZRANGEBYSCORE', queue_key(queue, 'delayed'), '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  if #entries == 0 then return 0 end
  local removed, ready = {}, {}
  for i = 1, #entries, 2 do
    local id, priority = entries[i], call('HGET', task_key(entries[i]), 'priority')
    removed[i], removed[i + 1] = entries[i + 1], id
    if priority then -- otherwise the task was deleted by hand, and only its id is removed
      ready[priority] = ready[priority] or {}
      table.insert(ready[priority], id)
    end
  end
  zset_remove(queue_key(queue, 'delayed'), removed)
  for priority, ids in pairs(ready) do
    if push(ready_key(queue, priority), ids) == #ids then wake_waiters(queue, now) end
  end
  return #entries / 2
end
