--! queue_position: count the tasks that would be claimed before a ready task.
--! KEYS    queues ghosts waiting
--! ARGV    root tid id clock
--! RETURNS command now_ms state in_progress ahead_by_priority ahead_in_list awaited_until_ms | nothing;
--! RETURNS ahead_in_list -1: the task is not ready, or behind MAX_SCANNED others
--! EFFECTS none
--! COST    O(min(length of the ready list, MAX_SCANNED))
--! FLAGS   no-writes
--@ include keys, now
-- The most ids that the search for the task reads, so that a page of the console does not delay other clients.
local MAX_SCANNED = 10000
local task = call('HMGET', task_key(id), 'queue', 'priority', 'status')
local queue, priority, status = task[1], tonumber(task[2]), task[3]
if not queue or string.sub(queue, 1, #tid + 1) ~= tid .. ':' then return {} end
local command = command_of(queue)
local higher = 0
for level = priority + 1, 9 do
  local length = call('LLEN', ready_key(queue, level))
  higher = higher + length - (tonumber(call('HGET', ghosts, command .. ':' .. level) or 0))
end
local list = ready_key(queue, priority)
local at = status == 'PENDING' and call('LPOS', list, id, 'RANK', -1, 'MAXLEN', MAX_SCANNED)
local ahead = at and call('LLEN', list) - 1 - at or -1
local in_progress = call('ZCARD', queue_key(queue, 'inprog'))
local state, awaited_until = call('HGET', queues, command) or '', call('ZSCORE', waiting, queue) or 0
return { command, now_ms(), state, in_progress, higher, ahead, awaited_until }
