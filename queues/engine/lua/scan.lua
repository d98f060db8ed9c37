--! scan: read a page of the ids in one index of a queue, after the last id of the previous page.
--! KEYS    queues
--! ARGV    root tid command index last_position last_id limit
--! RETURNS {id position lease}*    position: its offset in a list, or its score in a set; lease: '' unless in progress
--! EFFECTS none
--! COST    O(limit + log n); O(limit + MAX_SCANNED) for a ready list
--! FLAGS   no-writes
--@ include keys
local _ = queues -- routes the call to the tenant's slot
-- The most ids that the search for the last id reads, from the left end, where new ids are pushed.
local MAX_SCANNED = 10000
local key = queue_key(tid .. ':' .. command, index)
local is_list = string.sub(index, 1, 6) == 'ready:'
local start, reply = 0, {}
if is_list then
  if last_id ~= '' then
    -- New ids have shifted the last id to the right. If it was claimed, the scan continues at its old position.
    start = (call('LPOS', key, last_id, 'MAXLEN', MAX_SCANNED) or tonumber(last_position)) + 1
  end
  for n, id in ipairs(call('LRANGE', key, start, start + limit - 1)) do
    reply[#reply + 1] = { id, tostring(start + n - 1), '' }
  end
else
  if last_id ~= '' then
    local rank = call('ZRANK', key, last_id)
    start = rank and rank + 1 or call('ZCOUNT', key, '-inf', '(' .. last_position)
  end
  local entries = call('ZRANGE', key, start, start + limit - 1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local lease = index == 'inprog' and call('HGET', task_key(entries[i]), 'lease') or ''
    reply[#reply + 1] = { entries[i], entries[i + 1], lease }
  end
end
return reply
