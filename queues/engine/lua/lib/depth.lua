-- Counts the ready and delayed tasks in all queues of the tenant. It reads every queue, so it runs only for a tenant
-- with a limit.
local function count_waiting_tasks()
  local count = 0
  for _, command in ipairs(call('HKEYS', queues)) do
    local name = tid .. ':' .. command
    count = count + call('ZCARD', queue_key(name, 'delayed'))
    for priority = 0, 9 do count = count + call('LLEN', ready_key(name, priority)) end
  end
  for _, ghost in ipairs(call('HVALS', tenant_key(queue, 'ghosts'))) do count = count - ghost end
  return count
end
