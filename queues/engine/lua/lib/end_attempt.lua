-- Ends an attempt without success, for nack, abandon and an expired lease. The task becomes delayed, ready or dead.
-- `default_backoff` is "<backoff> <base ms> <cap ms>". A queue with its own policy has the same words in `policies`,
-- followed by its dead letter queue if it has one.
local ATTEMPT_FIELDS = { 'status', 'attempts', 'error', 'updated', 'visible', 'max', 'priority', 'lease', 'created',
  'past', 'queue', 'awaited' }
local WRITTEN_FIELDS = { 'status', 'attempts', 'error', 'updated', 'visible' }
local FORWARDED_FIELDS = { 'status', 'attempts', 'error', 'updated', 'visible', 'past', 'queue', 'from' }

local policies = {}
local function policy_of(queue)
  if not policies[queue] then
    local text = call('HGET', tenant_key(queue, 'policies'), command_of(queue)) or default_backoff
    local backoff, base, cap, dead_letter_queue = string.match(text, '^(%S+) (%S+) (%S+) ?(%S*)$')
    policies[queue] = { backoff, tonumber(base), tonumber(cap), dead_letter_queue }
  end
  return policies[queue]
end

local function backoff_ms(queue, attempts)
  local backoff, base, cap = unpack(policy_of(queue))
  local delay = base
  if backoff == 'linear' then
    delay = base * attempts
  elseif backoff ~= 'fixed' then
    delay = base * 2 ^ (attempts - 1)
  end
  delay = math.min(delay, cap)
  if backoff == 'exp_full_jitter' then
    delay = delay * math.random()
  elseif backoff == 'exp_equal_jitter' then
    delay = delay / 2 + delay / 2 * math.random()
  end
  return math.floor(delay)
end

-- The changes of the indexes by queue: entries that leave `inprog`, entries for `delayed` and `dlq`, and ready ids by
-- priority. They are collected so that a thousand tasks cost one command per index.
local changes = {}
local function changes_of(queue)
  if not changes[queue] then changes[queue] = { ended = {}, delayed = {}, dead = {}, ready = {} } end
  return changes[queue]
end

-- Moves a task without attempts left to the dead letter queue of its queue, where it is ready with 0 attempts used.
-- This happens once per task: two queues that name each other would otherwise exchange it for ever. Returns whether the
-- task was moved.
local function forward_dead(id, task, attempts, now, outcome, error_text, own_error)
  local queue = task[11]
  local dead_letter_queue = policy_of(queue)[4]
  if dead_letter_queue == '' or call('HGET', task_key(id), 'from') then return false end
  local visible, priority, lease, created = task[5], task[7], task[8], task[9]
  local target, past = string.match(queue, '^[^:]+') .. ':' .. dead_letter_queue, (task[10] or 0) + attempts
  local before = { task[1], task[2], task[3], task[4], task[5], task[10], queue, false }
  hash_set(task_key(id), FORWARDED_FIELDS, before, 'status', 'PENDING', 'attempts', 0, 'error', error_text,
    'updated', now, 'visible', now, 'past', past, 'queue', target, 'from', queue)
  record_event(id, queue, past, outcome, 'PENDING', 0, priority, lease, created, visible, now, own_error)
  local ready = changes_of(target).ready
  ready[priority] = ready[priority] or {}
  table.insert(ready[priority], id)
  return true
end

-- Writes the task and its event; `write_changes` then writes the indexes. Without `delay`, the queue's backoff applies.
local function end_attempt(id, task, deadline, now, outcome, reason, delay)
  local attempts, error_before, visible_before, max_attempts = (task[2] or 0) + 1, task[3], task[5], task[6]
  local priority, lease, created, past, queue, awaited = task[7], task[8], task[9], task[10] or 0, task[11], task[12]
  local change = changes_of(queue)
  local status, visible = 'PENDING', now
  -- The error of this attempt. Without one, a task that is retried keeps the error of an earlier attempt.
  local own_error = reason ~= '' and reason or outcome == 'EXPIRED' and 'LEASE_EXPIRED' or ''
  local error_text = own_error ~= '' and own_error or error_before
  if attempts >= tonumber(max_attempts) then
    status, visible = 'FAILED', nil
    error_text = own_error ~= '' and own_error or 'MAX_ATTEMPTS'
    if forward_dead(id, task, attempts, now, outcome, error_text, own_error) then
      change.ended[#change.ended + 1] = deadline
      change.ended[#change.ended + 1] = id
      return 'PENDING', 0
    end
  else
    delay = delay or backoff_ms(queue, attempts)
    visible = now + delay
  end
  hash_set(task_key(id), WRITTEN_FIELDS, task, 'status', status, 'attempts', attempts, 'error', error_text or '',
    'updated', now, 'visible', visible or visible_before or created)
  record_event(id, queue, past + attempts, outcome, status, attempts, priority, lease, created, visible_before, now,
    own_error)
  change.ended[#change.ended + 1] = deadline
  change.ended[#change.ended + 1] = id
  if status == 'FAILED' then
    change.dead[#change.dead + 1] = now
    change.dead[#change.dead + 1] = id
    if awaited then announce_ends({ id }) end
  elseif visible > now then
    change.delayed[#change.delayed + 1] = visible
    change.delayed[#change.delayed + 1] = id
    if not change.first_due or visible < change.first_due then change.first_due = visible end
  else
    change.ready[priority] = change.ready[priority] or {}
    table.insert(change.ready[priority], id)
  end
  return status, visible and visible - now or 0
end

local function write_changes(now)
  for queue, change in pairs(changes) do
    if #change.ended > 0 then zset_remove(queue_key(queue, 'inprog'), change.ended) end
    if #change.delayed > 0 then
      zset_add(queue_key(queue, 'delayed'), change.delayed)
      mark_due_by(queue, change.first_due)
    end
    if #change.dead > 0 then
      local expiries = {}
      for i = 2, #change.dead, 2 do
        expiries[i - 1] = now + tonumber(dead_retention_ms)
        expiries[i] = change.dead[i]
      end
      zset_add(queue_key(queue, 'dlq'), change.dead)
      zset_add(expiry, expiries)
    end
    for priority, ids in pairs(change.ready) do
      if push(ready_key(queue, priority), ids) == #ids then wake_waiters(queue, now) end
    end
  end
end
