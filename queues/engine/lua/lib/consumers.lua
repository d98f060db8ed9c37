-- The limit on tasks in progress, which a queue's policy can set, follows the queue's state: "active 20". A claim reads
-- the state anyway, so queues without a limit cost nothing.
local function free_slots(state, queue)
  local limit_text = state and string.match(state, '^active (%d+)$')
  return limit_text and math.max(0, limit_text - call('ZCARD', queue_key(queue, 'inprog')))
end

-- LMPOP does not report in advance from which queue it takes, so the number of ids is capped by the smallest number of
-- free slots of all queues that have one.
local function cap_to_free_slots(slots, count)
  for _, free in pairs(slots) do
    if free > 0 and free < count then count = free end
  end
  return count
end
