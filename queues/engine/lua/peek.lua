--! peek: read the next ready tasks of a queue, those in progress and the delayed ones, without changing them.
--! KEYS    queues ghosts
--! ARGV    root tid command limit
--! RETURNS {task…}* ready, {task…}* in progress by deadline, {task…}* delayed by due time;
--! RETURNS a task is its id, its score in the index, and the values of ENTRY_FIELDS
--! EFFECTS none
--! COST    O(limit + log n)
--! FLAGS   no-writes
--@ include keys
local _ = queues, ghosts -- route the call to the tenant's slot
local ENTRY_FIELDS = { 'priority', 'attempts', 'max', 'created', 'visible', 'lease', 'progress', 'status' }
-- The most ids of ended tasks that are skipped in one ready list.
local MAX_GHOSTS = 200
local queue = tid .. ':' .. command

local function read_entry(id, score)
  local fields = call('HMGET', task_key(id), unpack(ENTRY_FIELDS))
  local entry = { id, score }
  for i = 1, #ENTRY_FIELDS do entry[i + 2] = fields[i] or '' end
  local status = fields[8]
  return entry, status
end

local ready, max_entries = {}, tonumber(limit)
for priority = 9, 0, -1 do
  local left = max_entries - #ready
  if left > 0 then
    local ids = call('LRANGE', ready_key(queue, priority), -(left + MAX_GHOSTS), -1)
    for i = #ids, 1, -1 do
      if #ready == max_entries then break end
      local entry, status = read_entry(ids[i], '')
      if status == 'PENDING' then ready[#ready + 1] = entry end
    end
  end
end

local function by_score(part)
  local index, entries = call('ZRANGE', queue_key(queue, part), 0, limit - 1, 'WITHSCORES'), {}
  for i = 1, #index, 2 do
    local entry, status = read_entry(index[i], index[i + 1])
    if status then entries[#entries + 1] = entry end
  end
  return entries
end

return { ready, by_score('inprog'), by_score('delayed') }
