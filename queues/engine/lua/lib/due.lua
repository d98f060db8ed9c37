-- `due` has, for each queue, a lower bound of the time at which its next delay or lease ends. A claim needs
-- only one ZSCORE to find that a queue needs no maintenance.
local function mark_due_by(queue, moment)
  local at = call('ZSCORE', due, queue)
  if not at or moment < tonumber(at) then zset_move(due, queue, at, moment) end
end

local function refresh_due(queue)
  local at = call('ZSCORE', due, queue)
  local delayed = call('ZRANGE', queue_key(queue, 'delayed'), 0, 0, 'WITHSCORES')[2]
  local leased = call('ZRANGE', queue_key(queue, 'inprog'), 0, 0, 'WITHSCORES')[2]
  local first = delayed and leased and math.min(delayed, leased) or tonumber(delayed or leased)
  if first then
    zset_move(due, queue, at, first)
  elseif at then
    zset_remove(due, { at, queue })
  end
  return first
end
