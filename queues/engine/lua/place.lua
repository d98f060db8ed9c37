--! place: where a task stands: what a claim would find before it.
--! KEYS    queues ghosts waiting
--! ARGV    root tid id clock
--! RETURNS now_ms state in_progress ahead_by_priority ahead_in_line awaited_until_ms | nothing
--! EFFECTS none
--! COST    O(min(length of the line, LOOKED_AT))
--! FLAGS   no-writes
--@ include keys, now
-- A look for a person must not hold up the others: beyond this many, nobody counts.
local LOOKED_AT = 10000
local task = call('HMGET', task_key(id), 'queue', 'priority', 'status')
local queue, priority = task[1], tonumber(task[2])
if not queue or string.sub(queue, 1, #tid + 1) ~= tid .. ':' then return {} end
local command = command_of(queue)
local higher = 0
for above = priority + 1, 9 do
  higher = higher + call('LLEN', ready_key(queue, above)) - (tonumber(call('HGET', ghosts, command .. ':' .. above) or 0))
end
local line = ready_key(queue, priority)
local at = task[3] == 'PENDING' and call('LPOS', line, id, 'RANK', -1, 'MAXLEN', LOOKED_AT)
local ahead = at and call('LLEN', line) - 1 - at or -1
local busy = call('ZCARD', queue_key(queue, 'inprog'))
return { now_ms(), call('HGET', queues, command) or '', busy, higher, ahead, call('ZSCORE', waiting, queue) or 0 }
