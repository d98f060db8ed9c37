--! find_by_idempotency_key: find the tasks that were created with these idempotency keys.
--! KEYS    due
--! ARGV    root tid {digest fingerprint}*
--! RETURNS {{same task…} | nil}*    same = 1 if the request is identical
--! EFFECTS none
--! COST    O(n)
--! FLAGS   allow-oom
--@ include keys, task
local _ = due -- routes the call to the tenant's slot
local reply = {}
for i = args_from, #ARGV, 2 do
  local id = call('GET', idem_key(tid, ARGV[i]))
  local task = id and read_task(id)
  local answer = false
  if task then answer = { call('HGET', task_key(id), 'fingerprint') == ARGV[i + 1] and 1 or 0, unpack(task) } end
  reply[#reply + 1] = answer
end
return reply
