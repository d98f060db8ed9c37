-- Redis does not roll back a script that fails, so this wrapper does. Every write stores its inverse in `undo`. When
-- the script raises an error, the inverses run, newest first, before the error is returned.
local undo = {}
local function main()
--@ script
end
local ok, reply = pcall(main)
if ok then return reply end
local function members_of(entries)
  local members = {}
  for i = 2, #entries, 2 do members[i / 2] = entries[i] end
  return unpack(members)
end
local inverses = {
  hash = function(key, fields, before)
    for i, field in ipairs(fields) do
      if before[i] then call('HSET', key, field, before[i]) else call('HDEL', key, field) end
    end
  end,
  count = function(key, field, by)
    if call('HINCRBY', key, field, by) == 0 then call('HDEL', key, field) end
  end,
  created = function(key) call('DEL', key) end,
  string = function(key, before) call('SET', key, before, 'KEEPTTL') end,
  pushed = function(key, count) call('LPOP', key, count) end,
  popped = function(key, ids)
    for i = #ids, 1, -1 do call('RPUSH', key, ids[i]) end
  end,
  added = function(key, entries) call('ZREM', key, members_of(entries)) end,
  removed = function(key, entries) call('ZADD', key, unpack(entries)) end,
  entry = function(key, id) call('XDEL', key, id) end,
}
for i = #undo - 3, 1, -4 do inverses[undo[i]](undo[i + 1], undo[i + 2], undo[i + 3]) end
return redis.error_reply('CODEQ ' .. tostring(type(reply) == 'table' and reply.err or reply))
