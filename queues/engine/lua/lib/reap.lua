-- The tasks of a queue whose lease is over are given back. Exact, by deadline: nothing is sampled.
local function reap_expired(queue, now, limit)
  local found = call('ZRANGEBYSCORE', queue_key(queue, 'inprog'), '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
  local dead = 0
  for i = 1, #found, 2 do
    local id, deadline = found[i], found[i + 1]
    local was = call('HMGET', task_key(id), unpack(HELD))
    if was[1] == 'IN_PROGRESS' and was[11] == queue then
      if give_back(id, was, deadline, now, 'EXPIRED', '') == 'FAILED' then dead = dead + 1 end
    else
      table.insert(moves_of(queue).leave, deadline)
      table.insert(moves_of(queue).leave, id)
    end
  end
  if #found > 0 then settle(now) end
  moves = {}
  return #found / 2, dead
end
