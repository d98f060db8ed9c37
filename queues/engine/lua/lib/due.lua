-- `due` has a lower bound, for each queue, of the time at which its next task is due: a delayed task to promote, or an
-- expired lease to reap. A claim needs only one ZSCORE to find that a queue needs no maintenance.
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
