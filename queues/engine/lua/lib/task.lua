-- The fields of a task in a reply. queues/engine/replies.py relies on their order.
local TASK_FIELDS = { 'queue', 'spec', 'status', 'priority', 'max', 'created', 'visible', 'updated', 'attempts', 'lease',
  'error', 'progress', 'idem', 'ended' }

local function belongs_to_tenant(queue)
  return queue and string.sub(queue, 1, #tid + 1) == tid .. ':'
end

local function read_task(id)
  local fields = call('HMGET', task_key(id), unpack(TASK_FIELDS))
  local queue, status = fields[1], fields[3]
  if not belongs_to_tenant(queue) then return nil end
  local score = ''
  if status == 'IN_PROGRESS' then
    score = call('ZSCORE', queue_key(queue, 'inprog'), id)
  elseif status == 'FAILED' then
    score = call('ZSCORE', queue_key(queue, 'dlq'), id)
  elseif status == 'PENDING' then
    score = call('ZSCORE', queue_key(queue, 'delayed'), id)
  end
  for i = 1, #TASK_FIELDS do fields[i] = fields[i] or '' end
  fields[#TASK_FIELDS + 1] = score or ''
  fields[#TASK_FIELDS + 2] = id
  return fields
end
