-- The due tasks of a queue become ready, each at the back of its priority.
local function promote_due(queue, now, limit)
  local found = call('ZRANGEBYSCORE', queue_key(queue, 'delayed'), '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  if #found == 0 then return 0 end
  local leave, ready = {}, {}
  for i = 1, #found, 2 do
    local id, priority = found[i], call('HGET', task_key(found[i]), 'priority')
    leave[i], leave[i + 1] = found[i + 1], id
    if priority then -- else somebody deleted the task behind our back: its id just goes
      ready[priority] = ready[priority] or {}
      table.insert(ready[priority], id)
    end
  end
  zset_remove(queue_key(queue, 'delayed'), leave)
  for priority, ids in pairs(ready) do
    if push(ready_key(queue, priority), ids) == #ids then woke(queue, now) end
  end
  return #found / 2
end
