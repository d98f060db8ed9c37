-- What waits in all queues of the tenant, ready or delayed. Asked only where a limit is set: it looks at every queue.
local function waiting_tasks()
  local count = 0
  for _, command in ipairs(call('HKEYS', queues)) do
    local name = tid .. ':' .. command
    count = count + call('ZCARD', queue_key(name, 'delayed'))
    for priority = 0, 9 do count = count + call('LLEN', ready_key(name, priority)) end
  end
  for _, ghost in ipairs(call('HVALS', tenant_key(queue, 'ghosts'))) do count = count - ghost end
  return count
end
