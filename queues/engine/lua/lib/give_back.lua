-- Ends an attempt without success: back to wait, back in line, or dead. Nack, abandon and expiry all end here.
-- `default_backoff` is "<policy> <base ms> <cap ms>"; a queue with a policy of its own has the same line in `policies`,
-- and behind it the queue that takes its dead, if there is one.
local HELD = { 'status', 'attempts', 'error', 'updated', 'visible', 'max', 'priority', 'lease', 'created', 'past',
  'queue', 'awaited' }
local WRITTEN = { 'status', 'attempts', 'error', 'updated', 'visible' }
local MOVED = { 'status', 'attempts', 'error', 'updated', 'visible', 'past', 'queue', 'from' }

local policies = {}
local function policy_of(queue)
  if not policies[queue] then
    local line = call('HGET', tenant_key(queue, 'policies'), command_of(queue)) or default_backoff
    local policy, base, cap, topic = string.match(line, '^(%S+) (%S+) (%S+) ?(%S*)$')
    policies[queue] = { policy, tonumber(base), tonumber(cap), topic }
  end
  return policies[queue]
end

local function backoff_ms(queue, attempts)
  local policy, base, cap = unpack(policy_of(queue))
  local delay = base
  if policy == 'linear' then
    delay = base * attempts
  elseif policy ~= 'fixed' then
    delay = base * 2 ^ (attempts - 1)
  end
  delay = math.min(delay, cap)
  if policy == 'exp_full_jitter' then
    delay = delay * math.random()
  elseif policy == 'exp_equal_jitter' then
    delay = delay / 2 + delay / 2 * math.random()
  end
  return math.floor(delay)
end

-- What is to be written, gathered by queue, so that a thousand tasks cost one command an index.
local moves = {}
local function moves_of(queue)
  if not moves[queue] then moves[queue] = { leave = {}, later = {}, dead = {}, back = {} } end
  return moves[queue]
end

-- Out of attempts where another queue takes the dead: there it is in line with fresh attempts. Once: two queues that
-- name each other would pass a task to and fro for ever. Answers whether it went.
local function move_on(id, was, attempts, now, outcome, problem, cause)
  local queue, priority, topic = was[11], was[7], policy_of(was[11])[4]
  if topic == '' or call('HGET', task_key(id), 'from') then return false end
  local there, past = string.match(queue, '^[^:]+') .. ':' .. topic, (was[10] or 0) + attempts
  hash_set(task_key(id), MOVED, { was[1], was[2], was[3], was[4], was[5], was[10], queue, false }, 'status', 'PENDING',
    'attempts', 0, 'error', problem, 'updated', now, 'visible', now, 'past', past, 'queue', there, 'from', queue)
  record(id, queue, past, outcome, 'PENDING', 0, priority, was[8], was[9], was[5], now, cause)
  local back = moves_of(there).back
  back[priority] = back[priority] or {}
  table.insert(back[priority], id)
  return true
end

-- Writes the task and its event; `settle` then writes the indexes. `delay` nil = the queue's backoff.
local function give_back(id, was, deadline, now, outcome, reason, delay)
  local queue, priority = was[11], was[7]
  local attempts = (was[2] or 0) + 1
  local move = moves_of(queue)
  local status, visible = 'PENDING', now
  -- What this attempt died of; a task that goes on keeps the last one that was told.
  local cause = reason ~= '' and reason or outcome == 'EXPIRED' and 'LEASE_EXPIRED' or ''
  local problem = cause ~= '' and cause or was[3]
  if attempts >= tonumber(was[6]) then
    status, visible = 'FAILED', nil
    problem = cause ~= '' and cause or 'MAX_ATTEMPTS'
    if move_on(id, was, attempts, now, outcome, problem, cause) then
      move.leave[#move.leave + 1] = deadline
      move.leave[#move.leave + 1] = id
      return 'PENDING', 0
    end
  else
    delay = delay or backoff_ms(queue, attempts)
    visible = now + delay
  end
  hash_set(task_key(id), WRITTEN, was, 'status', status, 'attempts', attempts, 'error', problem or '', 'updated', now,
    'visible', visible or was[5] or was[9])
  record(id, queue, (was[10] or 0) + attempts, outcome, status, attempts, priority, was[8], was[9], was[5], now, cause)
  move.leave[#move.leave + 1] = deadline
  move.leave[#move.leave + 1] = id
  if status == 'FAILED' then
    move.dead[#move.dead + 1] = now
    move.dead[#move.dead + 1] = id
    if was[12] then announce({ id }) end
  elseif visible > now then
    move.later[#move.later + 1] = visible
    move.later[#move.later + 1] = id
    if not move.first or visible < move.first then move.first = visible end
  else
    move.back[priority] = move.back[priority] or {}
    table.insert(move.back[priority], id)
  end
  return status, visible and visible - now or 0
end

local function settle(now)
  for queue, move in pairs(moves) do
    if #move.leave > 0 then zset_remove(queue_key(queue, 'inprog'), move.leave) end
    if #move.later > 0 then
      zset_add(queue_key(queue, 'delayed'), move.later)
      visit_by(queue, move.first)
    end
    if #move.dead > 0 then
      local ends = {}
      for i = 2, #move.dead, 2 do
        ends[i - 1] = now + tonumber(dead_retention_ms)
        ends[i] = move.dead[i]
      end
      zset_add(queue_key(queue, 'dlq'), move.dead)
      zset_add(expiry, ends)
    end
    for priority, ids in pairs(move.back) do
      if push(ready_key(queue, priority), ids) == #ids then woke(queue, now) end
    end
  end
end
