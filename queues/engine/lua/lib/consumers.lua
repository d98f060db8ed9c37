-- A queue whose policy says how many of its tasks may be in progress at once has that number behind its state:
-- "active 20". Others do not pay for it: a claim has the state in hand.
local function room_in(state, queue)
  local most = state and string.match(state, '^active (%d+)$')
  return most and math.max(0, most - call('ZCARD', queue_key(queue, 'inprog')))
end

-- The most that may be taken at once, from whichever queue it will be.
local function fewest(rooms, wanted)
  for _, room in pairs(rooms) do
    if room > 0 and room < wanted then wanted = room end
  end
  return wanted
end
