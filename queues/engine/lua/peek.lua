--! peek: look at a queue: who is next in line, who works, who waits for their time. Nothing moves.
--! KEYS    queues ghosts
--! ARGV    root tid command limit
--! RETURNS {task…}* in line, {task…}* in progress, {task…}* delayed, first who is next, who must answer, who is due;
--! RETURNS a task is its id, its score in the index, and its fields in the order of PEEKED
--! EFFECTS none
--! COST    O(limit + log n)
--! FLAGS   no-writes
--@ include keys
local _ = queues, ghosts -- route the call to the tenant's slot
local PEEKED = { 'priority', 'attempts', 'max', 'created', 'visible', 'lease', 'progress', 'status' }
-- Ids in line whose task has ended are passed over, but not for ever.
local GHOSTS_AT_MOST = 200
local queue = tid .. ':' .. command

local function peeked(id, score)
  local fields = call('HMGET', task_key(id), unpack(PEEKED))
  local line = { id, score }
  for i = 1, #PEEKED do line[i + 2] = fields[i] or '' end
  return line, fields[8]
end

local in_line, wanted = {}, tonumber(limit)
for priority = 9, 0, -1 do
  local left = wanted - #in_line
  if left > 0 then
    local ids = call('LRANGE', ready_key(queue, priority), -(left + GHOSTS_AT_MOST), -1)
    for i = #ids, 1, -1 do
      local line, status = peeked(ids[i], '')
      if status == 'PENDING' and #in_line < wanted then in_line[#in_line + 1] = line end
    end
  end
end

local function by_score(part)
  local found, lines = call('ZRANGE', queue_key(queue, part), 0, limit - 1, 'WITHSCORES'), {}
  for i = 1, #found, 2 do
    local line, status = peeked(found[i], found[i + 1])
    if status then lines[#lines + 1] = line end
  end
  return lines
end

return { in_line, by_score('inprog'), by_score('delayed') }
