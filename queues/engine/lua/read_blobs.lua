--! read_blobs: read the data of tasks that the audit stores, until it exceeds max_bytes.
--! KEYS    events
--! ARGV    root max_bytes {id}*
--! RETURNS {spec max answer}* of the first ids, and of at least one; nil for what a task does not have
--! EFFECTS none
--! COST    O(n)
--! FLAGS   no-writes
--@ include keys
local _ = events -- route the call to the partition's slot
local reply, n, bytes = {}, 0, 0
for i = args_from, #ARGV do
  local task = call('HMGET', task_key(ARGV[i]), 'spec', 'max', 'answer')
  local spec, answer = task[1], task[3]
  reply[n + 1], reply[n + 2], reply[n + 3] = spec, task[2], answer
  n = n + 3
  bytes = bytes + #(spec or '') + #(answer or '')
  if bytes > tonumber(max_bytes) then break end
end
return reply
