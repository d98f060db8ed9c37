--! known: the tasks that idempotency keys have made, without sending the tasks again.
--! KEYS    due
--! ARGV    root tid {digest fingerprint}*
--! RETURNS {{same task…} | nil}*
--! EFFECTS none
--! COST    O(n)
--! FLAGS   allow-oom
--@ include keys, task
local _ = due -- routes the call to the tenant's slot
local reply = {}
for i = args_from, #ARGV, 2 do
  local id = call('GET', idem_key(tid, ARGV[i]))
  local task = id and shown(id)
  local line = false
  if task then line = { call('HGET', task_key(id), 'fingerprint') == ARGV[i + 1] and 1 or 0, unpack(task) } end
  reply[#reply + 1] = line
end
return reply
