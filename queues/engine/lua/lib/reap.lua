-- Ends the attempts in a queue that have an expired lease, oldest deadline first. Returns the number of ids removed
-- from `inprog`, and how many of their tasks are dead now.
local function reap_expired(queue, now, limit)
  local entries = call('ZRANGEBYSCORE', queue_key(queue, 'inprog'), '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  local dead = 0
  for i = 1, #entries, 2 do
    local id, deadline = entries[i], entries[i + 1]
    local task = call('HMGET', task_key(id), unpack(ATTEMPT_FIELDS))
    local status, queue_of_task = task[1], task[11]
    if status == 'IN_PROGRESS' and queue_of_task == queue then
      if end_attempt(id, task, deadline, now, 'EXPIRED', '') == 'FAILED' then dead = dead + 1 end
    else -- the task has ended or moved to another queue: remove only its id
      table.insert(changes_of(queue).ended, deadline)
      table.insert(changes_of(queue).ended, id)
    end
  end
  if #entries > 0 then write_changes(now) end
  changes = {}
  return #entries / 2, dead
end
