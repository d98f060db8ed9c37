--! scan: the ids in one index of a queue, a piece at a time, on from the one that was seen last.
--! KEYS    queues
--! ARGV    root tid command place at after limit
--! RETURNS {id at lease}*    `at` is where it stands: an index in a list, a score in a set; lease, where it is in progress
--! EFFECTS none
--! COST    O(limit + log n), and O(LOOKED_AT) where a list has moved on meanwhile
--! FLAGS   no-writes
--@ include keys
local _ = queues -- routes the call to the tenant's slot
-- What has been seen is looked for so far from the end that new ids come in at.
local LOOKED_AT = 10000
local index = queue_key(tid .. ':' .. command, place)
local is_list = string.sub(place, 1, 6) == 'ready:'
local start, reply = 0, {}
if is_list then
  if after ~= '' then
    -- Ids that came meanwhile have moved it on; where it has left, its place tells how far we were.
    start = (call('LPOS', index, after, 'MAXLEN', LOOKED_AT) or tonumber(at)) + 1
  end
  for n, id in ipairs(call('LRANGE', index, start, start + limit - 1)) do
    reply[#reply + 1] = { id, tostring(start + n - 1), '' }
  end
else
  if after ~= '' then
    local rank = call('ZRANK', index, after)
    start = rank and rank + 1 or call('ZCOUNT', index, '-inf', '(' .. at)
  end
  local found = call('ZRANGE', index, start, start + limit - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local lease = place == 'inprog' and call('HGET', task_key(found[i]), 'lease') or ''
    reply[#reply + 1] = { found[i], found[i + 1], lease }
  end
end
return reply
