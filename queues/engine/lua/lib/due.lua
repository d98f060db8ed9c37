-- `due` holds a time for every queue that is not later than its next due task: a delayed task to promote or an expired
-- lease to reap. With one ZSCORE, a claim finds out that a queue needs no maintenance.
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
