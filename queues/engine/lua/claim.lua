--! claim: take the best ready tasks of some queues of a tenant and open their leases.
--! KEYS    due queues ghosts waiting woken events expiry {ready}*
--! ARGV    root tid worker token lease_ms limit inspect_limit wait_ms seed default_backoff dead_retention_ms clock limits {command}*
--! RETURNS LIMITED wait_ms | now_ms deadline_ms next_due_ms expired dead has_more {id spec priority max attempts created visible error}*
--! EFFECTS ready -n, inprog +n, task PENDING -> IN_PROGRESS; what is due in these queues is promoted and reaped first
--! COST    O((limit + inspect_limit) · log n), whatever the backlog
--! FLAGS   allow-oom
--@ include keys, write, now, lease
--@ lazy limiter(admitted, charge): limit
--@ lazy counters(room_in, fewest): consumers
--@ lazy repairs(promote_due, reap_expired, reschedule): due, wake, ended, give_back, promote, reap
-- Ids of ended tasks that one claim walks past; what is left of them is the next claim's.
local GHOSTS_AT_MOST = 200
local WRITTEN = { 'status', 'lease' }
-- When a queue that is as busy as it may be is looked at again, as nothing tells that one of its tasks has ended.
local BUSY_MS = 500
local now = now_ms()
if limits ~= '' then
  local admitted, charge = limiter()
  local buckets, wait = admitted(limits, now)
  if not buckets then return { 'LIMITED', wait } end
  charge(buckets, 1, now)
end
local states = call('HMGET', queues, unpack(ARGV, args_from))
local asked, visits, first_due, active, expired, dead = {}, {}, nil, 0, 0, 0
local budget = tonumber(inspect_limit)
local rooms, room_in, fewest
for n = 1, #states do
  local state, queue = states[n], tid .. ':' .. ARGV[args_from + n - 1]
  asked[n] = queue
  if state and state ~= 'active' and state ~= 'paused' then
    if not rooms then
      rooms, room_in, fewest = {}, counters()
    end
    if string.sub(state, 1, 6) == 'active' then states[n] = 'active' end
  end
  if states[n] == 'active' then
    local at = tonumber(call('ZSCORE', due, queue) or nil)
    if at and at <= now and budget > 0 then
      math.randomseed(tonumber(seed))
      local promote_due, reap_expired, reschedule = repairs()
      local moved = promote_due(queue, now, budget)
      local given_back, died = reap_expired(queue, now, budget)
      expired, dead = expired + given_back, dead + died
      budget = budget - math.max(moved, given_back)
      at = reschedule(queue)
    end
    visits[queue] = at
    if rooms then
      rooms[queue] = room_in(state, queue)
      if rooms[queue] == 0 then
        states[n] = 'busy'
        at = math.min(at or now + BUSY_MS, now + BUSY_MS)
      end
    end
    if states[n] == 'active' then active = active + 1 end
    if at and (not first_due or at < first_due) then first_due = at end
  end
end
-- Priority before command: every queue's nines, then every queue's eights.
local lists
if active == #asked then
  lists = { unpack(KEYS, keys_from) }
else
  lists = {}
  for at = keys_from, #KEYS do
    if states[(at - keys_from) % #asked + 1] == 'active' then lists[#lists + 1] = KEYS[at] end
  end
end
local count = #lists
lists[count + 1], lists[count + 2] = 'RIGHT', 'COUNT'

local deadline = now + lease_ms
local reply = { now, deadline, 0, expired, dead, 0 }
local wanted, looked = tonumber(limit), 0
local lease, leased = lease_of(now, token, worker), {}
while count > 0 and wanted > 0 and looked < limit + GHOSTS_AT_MOST do
  lists[count + 3] = rooms and fewest(rooms, wanted) or wanted
  local list, ids = pop(count, lists)
  if not list then break end
  looked = looked + #ids
  -- The inverse of ready_key.
  local queue, priority = string.sub(list, #root + 3, -9), string.sub(list, -1)
  local held = leased[queue] or {}
  leased[queue] = held
  local before = #held
  for _, id in ipairs(ids) do
    local key = task_key(id)
    local task = call('HMGET', key, 'status', 'lease', 'spec', 'max', 'attempts', 'created', 'visible', 'error')
    if task[1] == 'PENDING' then
      hash_set(key, WRITTEN, task, 'status', 'IN_PROGRESS', 'lease', lease)
      wanted = wanted - 1
      local h, r = #held, #reply
      held[h + 1], held[h + 2] = deadline, id
      reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = id, task[3], priority, task[4]
      reply[r + 5], reply[r + 6], reply[r + 7], reply[r + 8] = task[5] or 0, task[6], task[7] or task[6], task[8] or ''
    else -- a ghost: the task was cancelled or deleted while its id stood in line
      local field = command_of(queue) .. ':' .. priority
      if tonumber(call('HGET', ghosts, field) or 0) > 0 then count_up(ghosts, field, -1) end
      if task[1] == 'FAILED' then -- recalled: its id stands in line no more
        hash_remove(key, 'ghost', call('HGET', key, 'ghost'))
      end
    end
  end
  if rooms and rooms[queue] then
    rooms[queue] = rooms[queue] - (#held - before) / 2
    if rooms[queue] == 0 then
      for at = count, 1, -1 do
        if string.sub(lists[at], #root + 3, -9) == queue then table.remove(lists, at) end
      end
      count = #lists - 3
    end
  end
end
for queue, held in pairs(leased) do
  if #held > 0 then
    zset_add(queue_key(queue, 'inprog'), held)
    local at = visits[queue]
    if not at or deadline < at then zset_move(due, queue, at, deadline) end
  end
end
if #reply == 6 then
  reply[3] = first_due or 0
  reply[6] = looked > 0 and 1 or 0
  if tonumber(wait_ms) > 0 then
    for _, queue in ipairs(asked) do
      local before = call('ZSCORE', waiting, queue)
      if not before or tonumber(before) < now + wait_ms then zset_move(waiting, queue, before, now + wait_ms) end
    end
  end
end
return reply
