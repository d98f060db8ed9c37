--! submit: the holders of live leases hand in their results.
--! KEYS    events expiry
--! ARGV    root tid worker retention_ms clock {id status token answer error}*
--! RETURNS now_ms {OK | SAME completed_ms attempts | NOT_FOUND | NOT_OWNER | LEASE_LOST | CANCELLED | ENDED}*
--! EFFECTS task IN_PROGRESS -> COMPLETED | FAILED with its answer, inprog -n, expiry +n, events +n
--! COST    O(n · log inprog)
--! FLAGS   allow-oom
--@ include keys, write, now, ended, holder
local WRITTEN = { 'status', 'attempts', 'error', 'ended', 'answer', 'updated' }
local now = now_ms()
local reply, accepted, seen = { now }, {}, {}
for i = args_from, #ARGV, 5 do
  local id, status, answer = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  local task = call('HMGET', task_key(id), 'status', 'attempts', 'error', 'queue', 'worker', 'token', 'priority',
    'created', 'visible', 'claimed', 'past', 'awaited')
  local refused, deadline = refusal(id, task[4], task[1], task[5], task[6], worker, ARGV[i + 2], now)
  local before = seen[id]
  if before then
    reply[#reply + 1] = before.status == status and before.answer == answer and before.reply or { 'ENDED' }
  elseif refused == 'ENDED' and task[1] == status and task[5] == worker then
    local ended = call('HMGET', task_key(id), 'answer', 'ended')
    reply[#reply + 1] = ended[1] == answer and { 'SAME', ended[2], task[2] or 0 } or { refused }
  elseif refused then
    reply[#reply + 1] = { refused }
  else
    local attempts = (task[2] or 0) + (status == 'FAILED' and 1 or 0)
    accepted[#accepted + 1] = { i, task, deadline, attempts }
    reply[#reply + 1] = { 'OK', now, attempts }
    seen[id] = { status = status, answer = answer, reply = reply[#reply] }
  end
end
-- decided; only writes below
local leave, ends, awaited = {}, {}, {}
for _, item in ipairs(accepted) do
  local i, task, deadline, attempts = item[1], item[2], item[3], item[4]
  local id, status, queue = ARGV[i], ARGV[i + 1], task[4]
  hash_set(task_key(id), WRITTEN, { task[1], task[2], task[3] }, 'status', status, 'attempts', attempts,
    'error', ARGV[i + 4], 'ended', now, 'answer', ARGV[i + 3], 'updated', now)
  record(id, queue, (task[11] or 0) + (task[2] or 0) + 1, status, status, attempts, task[7], worker, task[8], task[9],
    task[10], now, ARGV[i + 4])
  local held = leave[queue]
  if not held then
    held = {}
    leave[queue] = held
  end
  held[#held + 1] = deadline
  held[#held + 1] = id
  ends[#ends + 1] = now + retention_ms
  ends[#ends + 1] = id
  if task[12] then awaited[#awaited + 1] = id end
end
for queue, held in pairs(leave) do zset_remove(queue_key(queue, 'inprog'), held) end
if #ends > 0 then zset_add(expiry, ends) end
announce(awaited)
return reply
