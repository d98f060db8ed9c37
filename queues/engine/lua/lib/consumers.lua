-- The limit on tasks in progress, which a queue's policy can set, is stored after the queue's state: "active 20". A
-- claim reads the state anyway, so queues without a limit cost nothing.
-- Returns the number of free slots, or nil for a queue without a limit.
local function count_free_slots(state, queue)
  local limit_text = state and string.match(state, '^active (%d+)$')
  return limit_text and math.max(0, limit_text - call('ZCARD', queue_key(queue, 'inprog')))
end

-- Returns `count`, or the smallest number of free slots if that is lower. LMPOP chooses the list itself, so its count
-- must fit every queue. Full queues are ignored, because the claim does not read their lists.
local function cap_to_free_slots(free_slots, count)
  for _, free in pairs(free_slots) do
    if free > 0 and free < count then count = free end
  end
  return count
end
