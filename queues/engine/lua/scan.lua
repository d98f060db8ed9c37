--! scan: read a page of the ids in one index of a queue, behind the last id of the page before.
--! KEYS    queues
--! ARGV    root tid command place at after limit
--! RETURNS {id at lease}*    `at`: its index in a list or its score in a set; lease: '' unless in progress
--! EFFECTS none
--! COST    O(limit + log n); O(limit + MAX_SCANNED) for a ready list
--! FLAGS   no-writes
--@ include keys
local _ = queues -- routes the call to the tenant's slot
-- How far from the left end, where new ids are pushed, the last id is searched.
local MAX_SCANNED = 10000
local index = queue_key(tid .. ':' .. command, place)
local is_list = string.sub(place, 1, 6) == 'ready:'
local start, reply = 0, {}
if is_list then
  if after ~= '' then
    -- New ids have shifted it to the right. If it was claimed, the scan continues at its old index.
    start = (call('LPOS', index, after, 'MAXLEN', MAX_SCANNED) or tonumber(at)) + 1
  end
  for n, id in ipairs(call('LRANGE', index, start, start + limit - 1)) do
    reply[#reply + 1] = { id, tostring(start + n - 1), '' }
  end
else
  if after ~= '' then
    local rank = call('ZRANK', index, after)
    start = rank and rank + 1 or call('ZCOUNT', index, '-inf', '(' .. at)
  end
  local entries = call('ZRANGE', index, start, start + limit - 1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local lease = place == 'inprog' and call('HGET', task_key(entries[i]), 'lease') or ''
    reply[#reply + 1] = { entries[i], entries[i + 1], lease }
  end
end
return reply
