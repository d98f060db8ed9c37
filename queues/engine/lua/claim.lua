--! claim: lease the ready tasks with the highest priority in some queues of a tenant.
--! KEYS    due queues ghosts waiting woken events expiry {ready}*
--! ARGV    root tid worker token lease_ms limit repair_limit wait_ms seed default_backoff dead_retention_ms clock limits {command}*
--! RETURNS LIMITED wait_ms | now_ms deadline_ms next_due_ms expired dead has_more {id spec priority max attempts created visible error}*
--! SHARED  for several workers, worker and token are empty, limit is their number, and "<token> <worker>" of each follows
--! SHARED  the commands; task n of the reply is leased to worker n
--! EFFECTS ready -n, inprog +n, task PENDING -> IN_PROGRESS; due tasks are promoted, expired leases reaped first
--! COST    O((limit + repair_limit) · log n), independent of the backlog
--! FLAGS   allow-oom
--@ include keys, write, now, lease, rate_limit, consumers
--@ lazy maintenance(promote_due, reap_expired, refresh_due): due, wake, events, end_attempt, promote, reap
-- The most ids of ended tasks that one claim removes. The next claim removes further ones.
local MAX_GHOSTS = 200
local WRITTEN_FIELDS = { 'status', 'lease' }
-- The time after which a waiting claim rereads a queue that is at its limit of tasks in progress. The end of a task
-- frees a slot, but is not announced.
local BUSY_RETRY_MS = 500
local now = now_ms()
if limits ~= '' then
  local buckets, wait = check_limits(limits, now)
  if not buckets then return { 'LIMITED', wait } end
  charge_buckets(buckets, 1, now)
end
-- Repair the queues, and find those from which a claim may take tasks.
local last_command = #ARGV
if worker == '' then last_command = last_command - limit end
local states = call('HMGET', queues, unpack(ARGV, args_from, last_command))
local names, due_times, first_due, active, expired, dead = {}, {}, nil, 0, 0, 0
local budget = tonumber(repair_limit)
local free_slots
for n = 1, #states do
  local state, queue = states[n], tid .. ':' .. ARGV[args_from + n - 1]
  names[n] = queue
  if state and state ~= 'active' and state ~= 'paused' then
    free_slots = free_slots or {}
    if string.sub(state, 1, 6) == 'active' then states[n] = 'active' end
  end
  if states[n] == 'active' then
    local due_at = tonumber(call('ZSCORE', due, queue) or nil)
    if due_at and due_at <= now and budget > 0 then
      math.randomseed(tonumber(seed))
      local promote_due, reap_expired, refresh_due = maintenance()
      local promoted = promote_due(queue, now, budget)
      local reaped, failed = reap_expired(queue, now, budget)
      expired, dead = expired + reaped, dead + failed
      budget = budget - math.max(promoted, reaped)
      due_at = refresh_due(queue)
    end
    due_times[queue] = due_at
    if free_slots then
      free_slots[queue] = count_free_slots(state, queue)
      if free_slots[queue] == 0 then
        states[n] = 'busy'
        due_at = math.min(due_at or now + BUSY_RETRY_MS, now + BUSY_RETRY_MS)
      end
    end
    if states[n] == 'active' then active = active + 1 end
    if due_at and (not first_due or due_at < first_due) then first_due = due_at end
  end
end
-- The ready lists, by priority first: the lists of priority 9 of all queues, then those of priority 8.
local lists
if active == #names then
  lists = { unpack(KEYS, keys_from) }
else
  lists = {}
  for at = keys_from, #KEYS do
    if states[(at - keys_from) % #names + 1] == 'active' then lists[#lists + 1] = KEYS[at] end
  end
end
local count = #lists
lists[count + 1], lists[count + 2] = 'RIGHT', 'COUNT'

local deadline = now + lease_ms
local reply = { now, deadline, 0, expired, dead, 0 }
local remaining, examined = tonumber(limit), 0
local lease, lease_entries = format_lease(now, token, worker), {}
while count > 0 and remaining > 0 and examined < limit + MAX_GHOSTS do
  lists[count + 3] = free_slots and cap_to_free_slots(free_slots, remaining) or remaining
  local list, ids = pop(count, lists)
  if not list then break end
  examined = examined + #ids
  -- Parse the list's key: root .. 'q:' .. queue .. ':ready:' .. priority
  local queue, priority = string.sub(list, #root + 3, -9), string.sub(list, -1)
  local entries = lease_entries[queue] or {}
  lease_entries[queue] = entries
  local before = #entries
  for _, id in ipairs(ids) do
    local key = task_key(id)
    local task = call('HMGET', key, 'status', 'lease', 'spec', 'max', 'attempts', 'created', 'visible', 'error')
    local status, spec, max_attempts, attempts = task[1], task[3], task[4], task[5]
    local created, visible, error_text = task[6], task[7], task[8]
    if status == 'PENDING' then
      if worker == '' then lease = now .. ' ' .. ARGV[#ARGV - remaining + 1] end
      hash_set(key, WRITTEN_FIELDS, task, 'status', 'IN_PROGRESS', 'lease', lease)
      remaining = remaining - 1
      local e, r = #entries, #reply
      entries[e + 1], entries[e + 2] = deadline, id
      reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = id, spec, priority, max_attempts
      reply[r + 5], reply[r + 6], reply[r + 7], reply[r + 8] = attempts or 0, created, visible or created, error_text or ''
    else -- a ghost: cancelled or deleted, or its replay undone, and its id stayed in the list
      local field = command_of(queue) .. ':' .. priority
      if tonumber(call('HGET', ghosts, field) or 0) > 0 then counter_add(ghosts, field, -1) end
      if status == 'FAILED' then -- its replay was undone, and its ghost is removed now
        hash_remove(key, 'ghost', call('HGET', key, 'ghost'))
      end
    end
  end
  if free_slots and free_slots[queue] then
    free_slots[queue] = free_slots[queue] - (#entries - before) / 2
    if free_slots[queue] == 0 then
      for at = count, 1, -1 do
        if string.sub(lists[at], #root + 3, -9) == queue then table.remove(lists, at) end
      end
      count = #lists - 3
    end
  end
end
for queue, entries in pairs(lease_entries) do
  if #entries > 0 then
    zset_add(queue_key(queue, 'inprog'), entries)
    local at = due_times[queue]
    if not at or deadline < at then zset_move(due, queue, at, deadline) end
  end
end
local is_empty = #reply == 6
if is_empty or worker == '' and remaining > 0 then -- a worker got no task
  if not is_empty then -- the leases of the other workers may be the next to expire, or have filled a queue
    first_due = math.min(first_due or deadline, deadline, free_slots and now + BUSY_RETRY_MS or deadline)
  end
  reply[3] = first_due or 0
  reply[6] = examined >= limit + MAX_GHOSTS and 1 or 0
  if tonumber(wait_ms) > 0 then
    for _, queue in ipairs(names) do
      local before = call('ZSCORE', waiting, queue)
      if not before or tonumber(before) < now + wait_ms then zset_move(waiting, queue, before, now + wait_ms) end
    end
  end
end
return reply
