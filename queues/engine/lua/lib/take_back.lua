-- Redis does not roll a script back; this does. Every write remembers its inverse in `undo`, and when anything fails,
-- whatever the reason, what was written is taken back, newest first, before the error leaves the script.
local undo = {}
local function main()
--@ script
end
local ok, reply = pcall(main)
if ok then return reply end
local function members(pairs)
  local found = {}
  for i = 2, #pairs, 2 do found[i / 2] = pairs[i] end
  return unpack(found)
end
local inverses = {
  hash = function(key, fields, was)
    for i, field in ipairs(fields) do
      if was[i] then call('HSET', key, field, was[i]) else call('HDEL', key, field) end
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
  added = function(key, pairs) call('ZREM', key, members(pairs)) end,
  removed = function(key, pairs) call('ZADD', key, unpack(pairs)) end,
  entry = function(key, id) call('XDEL', key, id) end,
}
for i = #undo - 3, 1, -4 do inverses[undo[i]](undo[i + 1], undo[i + 2], undo[i + 3]) end
return redis.error_reply('CODEQ ' .. tostring(type(reply) == 'table' and reply.err or reply))
