--! submit: store the results of leased tasks.
--! KEYS    events expiry
--! ARGV    root tid worker retention_ms clock {id status token answer error}*
--! RETURNS now_ms {OK | SAME | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED, completed_ms attempts}*
--! SHARED  for results of several workers, worker is empty, and each result has its worker as a sixth word
--! EFFECTS task IN_PROGRESS -> COMPLETED | FAILED with its answer, inprog -n, expiry +n, events +n
--! COST    O(n · log inprog)
--! FLAGS   allow-oom
--@ include keys, write, now, lease, events, check_lease, retention
local width = worker == '' and 6 or 5
local WRITTEN_FIELDS = { 'status', 'attempts', 'error', 'ended', 'answer' }
local now = now_ms()
local reply, first_of, accepted = { now }, {}, {}
for i = args_from, #ARGV, width do
  local id, status, token, answer = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local worker = width == 6 and ARGV[i + 5] or worker
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'error', 'ended', 'answer', 'queue', 'lease', 'priority',
    'created', 'visible', 'past', 'awaited')
  local status_before, queue, lease = task[1], task[6], task[7]
  local refusal, deadline = check_lease(id, queue, status_before, lease, worker, token, now)
  local attempts, ended = tonumber(task[2] or 0), now
  local first = first_of[id]
  if refusal == 'ENDED' and status_before == status and worker_of(lease) == worker and task[5] == answer then
    refusal, ended = 'SAME', task[4]
  elseif first and not refusal then -- the task occurs twice in this batch
    refusal = ARGV[first + 1] == status and ARGV[first + 3] == answer and 'SAME' or 'ENDED'
  end
  if not refusal then
    local n = #accepted
    accepted[n + 1], accepted[n + 2], accepted[n + 3] = i, task, deadline
    first_of[id] = i
  end
  if status == 'FAILED' and (not refusal or first) then attempts = attempts + 1 end
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3] = refusal or 'OK', ended, attempts
end
-- All checks are done; only writes follow.
local lease_entries, expiries, common_retention = {}, {}, tonumber(retention_ms)
for n = 1, #accepted, 3 do
  local i, task, deadline = accepted[n], accepted[n + 1], accepted[n + 2]
  local id, status, answer, error_text = ARGV[i], ARGV[i + 1], ARGV[i + 3], ARGV[i + 4]
  local attempts, error_before, queue, lease = tonumber(task[2] or 0), task[3], task[6], task[7]
  local priority, created, visible = task[8], task[9], task[10]
  local attempt = (task[11] or 0) + attempts + 1
  if status == 'FAILED' then
    attempts = attempts + 1
    hash_set(task_key(id), WRITTEN_FIELDS, task, 'status', status, 'ended', now, 'answer', answer,
      'attempts', attempts, 'error', error_text)
  elseif error_before then -- clears the error of an earlier attempt
    hash_set(task_key(id), WRITTEN_FIELDS, task, 'status', status, 'ended', now, 'answer', answer, 'error', '')
  else
    hash_set(task_key(id), WRITTEN_FIELDS, task, 'status', status, 'ended', now, 'answer', answer)
  end
  record_event(id, queue, attempt, status, status, attempts, priority, lease, created, visible, now, error_text)
  local entries = lease_entries[queue]
  if not entries then
    entries = {}
    lease_entries[queue] = entries
  end
  local h, e = #entries, #expiries
  entries[h + 1], entries[h + 2] = deadline, id
  expiries[e + 1], expiries[e + 2] = now + (common_retention or retention_of(queue)), id
end
for queue, entries in pairs(lease_entries) do zset_remove(queue_key(queue, 'inprog'), entries) end
if #expiries > 0 then zset_add(expiry, expiries) end
for n = 1, #accepted, 3 do
  local i, task = accepted[n], accepted[n + 1]
  local awaited = task[12]
  if awaited then announce_ends({ ARGV[i] }) end
end
return reply
