-- A task as Python reads it back: these fields, in this order (queues/engine/replies.py knows it).
local SHOWN = { 'queue', 'spec', 'status', 'priority', 'max', 'created', 'visible', 'updated', 'attempts', 'lease',
  'error', 'progress', 'idem', 'ended' }

local function is_of_tenant(queue)
  return queue and string.sub(queue, 1, #tid + 1) == tid .. ':'
end

local function shown(id)
  local fields = call('HMGET', task_key(id), unpack(SHOWN))
  local queue, status = fields[1], fields[3]
  if not is_of_tenant(queue) then return nil end
  local score = ''
  if status == 'IN_PROGRESS' then
    score = call('ZSCORE', queue_key(queue, 'inprog'), id)
  elseif status == 'FAILED' then
    score = call('ZSCORE', queue_key(queue, 'dlq'), id)
  elseif status == 'PENDING' then
    score = call('ZSCORE', queue_key(queue, 'delayed'), id)
  end
  for i = 1, #SHOWN do fields[i] = fields[i] or '' end
  fields[#SHOWN + 1] = score or ''
  fields[#SHOWN + 2] = id
  return fields
end
