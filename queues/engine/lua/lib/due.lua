-- `due` promises, for every queue, a moment no later than the first one at which something in it needs a visit:
-- a delayed task to promote or a lease to reap. So one ZSCORE tells a claim that there is nothing to repair.
local function visit_by(queue, moment)
  local at = call('ZSCORE', due, queue)
  if not at or moment < tonumber(at) then zset_move(due, queue, at, moment) end
end

local function reschedule(queue)
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
