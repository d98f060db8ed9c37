--! submit: the holders of live leases hand in their results.
--! KEYS    events expiry
--! ARGV    root tid worker retention_ms clock {id status token answer error}*
--! RETURNS now_ms {OK | SAME | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED, completed_ms attempts}*
--! EFFECTS task IN_PROGRESS -> COMPLETED | FAILED with its answer, inprog -n, expiry +n, events +n
--! COST    O(n · log inprog)
--! FLAGS   allow-oom
--@ include keys, write, now, lease, ended, holder
--@ lazy retention(kept_ms): retention
local WRITTEN = { 'status', 'attempts', 'error', 'ended', 'answer' }
local now = now_ms()
local reply, first_of, accepted = { now }, {}, {}
for i = args_from, #ARGV, 5 do
  local id, status, answer = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'error', 'ended', 'answer', 'queue', 'lease', 'priority',
    'created', 'visible', 'past', 'awaited')
  local refused, deadline = refusal(id, task[6], task[1], task[7], ARGV[i + 2], now)
  local attempts, ended = tonumber(task[2] or 0), now
  local first = first_of[id]
  if refused == 'ENDED' and task[1] == status and worker_of(task[7]) == worker and task[5] == answer then
    refused, ended = 'SAME', task[4]
  elseif first and not refused then
    refused = ARGV[first + 1] == status and ARGV[first + 3] == answer and 'SAME' or 'ENDED'
  end
  if not refused then
    local n = #accepted
    accepted[n + 1], accepted[n + 2], accepted[n + 3] = i, task, deadline
    first_of[id] = i
  end
  if status == 'FAILED' and (not refused or first) then attempts = attempts + 1 end
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3] = refused or 'OK', ended, attempts
end
-- decided; only writes below
local leave, ends, kept = {}, {}, tonumber(retention_ms)
for n = 1, #accepted, 3 do
  local i, task = accepted[n], accepted[n + 1]
  local id, status, problem = ARGV[i], ARGV[i + 1], ARGV[i + 4]
  local queue, attempts = task[6], tonumber(task[2] or 0)
  local number = (task[11] or 0) + attempts + 1
  if status == 'FAILED' then
    attempts = attempts + 1
    hash_set(task_key(id), WRITTEN, task, 'status', status, 'ended', now, 'answer', ARGV[i + 3], 'attempts', attempts,
      'error', problem)
  elseif task[3] then -- what an earlier attempt died of is not this task's error any more
    hash_set(task_key(id), WRITTEN, task, 'status', status, 'ended', now, 'answer', ARGV[i + 3], 'error', '')
  else
    hash_set(task_key(id), WRITTEN, task, 'status', status, 'ended', now, 'answer', ARGV[i + 3])
  end
  record(id, queue, number, status, status, attempts, task[8], task[7], task[9], task[10], now, problem)
  local held = leave[queue]
  if not held then
    held = {}
    leave[queue] = held
  end
  local h, e = #held, #ends
  held[h + 1], held[h + 2] = accepted[n + 2], id
  ends[e + 1], ends[e + 2] = now + (kept or retention()(queue)), id
end
for queue, held in pairs(leave) do zset_remove(queue_key(queue, 'inprog'), held) end
if #ends > 0 then zset_add(expiry, ends) end
for n = 1, #accepted, 3 do
  if accepted[n + 1][12] then announce({ ARGV[accepted[n]] }) end
end
return reply
