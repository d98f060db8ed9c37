--! stats: count the tasks in queues of a tenant by state.
--! KEYS    queues ghosts
--! ARGV    root tid {command}*
--! RETURNS {command, state, delayed, inprog, dlq, oldest_ready_ms, ready by priority 0..9…}*
--! EFFECTS none
--! COST    O(queues); without a command, all queues of the tenant
--! FLAGS   no-writes
--@ include keys
local commands = { unpack(ARGV, args_from) }
if #commands == 0 then commands = call('HKEYS', queues) end
local reply = {}
for _, command in ipairs(commands) do
  local queue = tid .. ':' .. command
  local row = { command, call('HGET', queues, command) or '', call('ZCARD', queue_key(queue, 'delayed')),
    call('ZCARD', queue_key(queue, 'inprog')), call('ZCARD', queue_key(queue, 'dlq')), 0 }
  local oldest
  for priority = 0, 9 do
    local list = ready_key(queue, priority)
    local length = call('LLEN', list)
    if length > 0 then
      length = length - (tonumber(call('HGET', ghosts, command .. ':' .. priority) or 0))
      local head = call('HMGET', task_key(call('LINDEX', list, -1)), 'visible', 'created')
      local visible, created = head[1], head[2]
      local since = tonumber(visible or created or nil)
      if since and (not oldest or since < oldest) then oldest = since end
    end
    row[#row + 1] = length
  end
  row[6] = oldest or 0
  reply[#reply + 1] = row
end
return reply
