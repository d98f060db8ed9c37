-- Redis does not roll a script back; these do. Every write remembers its inverse, and when anything fails, whatever
-- the reason, `run` takes back what was written, newest first, before the error leaves the script.
local undo = {}

local function run(main)
  local ok, reply = pcall(main)
  if ok then return reply end
  for i = #undo, 1, -1 do
    undo[i][1](unpack(undo[i], 2))
  end
  return redis.error_reply('CODEQ ' .. tostring(type(reply) == 'table' and reply.err or reply))
end

local function restore(key, fields, was)
  for i, field in ipairs(fields) do
    if was[i] then call('HSET', key, field, was[i]) else call('HDEL', key, field) end
  end
end

-- `was` holds what `fields` were before, in their order: every field written must be among them.
local function hash_set(key, fields, was, ...)
  call('HSET', key, ...)
  undo[#undo + 1] = { restore, key, fields, was }
end

local function create(key, ...)
  call('HSET', key, ...)
  undo[#undo + 1] = { call, 'DEL', key }
end

local function string_set(key, before, value, ...)
  call('SET', key, value, ...)
  undo[#undo + 1] = before and { call, 'SET', key, before, 'KEEPTTL' } or { call, 'DEL', key }
end

local function push(key, ids)
  local length = call('LPUSH', key, unpack(ids))
  undo[#undo + 1] = { call, 'LPOP', key, #ids }
  return length
end

local function push_back(key, ids)
  for i = #ids, 1, -1 do call('RPUSH', key, ids[i]) end
end

-- Takes ids from the right of the first of `count` lists that is not empty; `words` are the lists and LMPOP's options.
local function pop(count, words)
  local taken = call('LMPOP', count, unpack(words))
  if not taken then return nil end
  undo[#undo + 1] = { push_back, taken[1], taken[2] }
  return taken[1], taken[2]
end

-- `pairs` is score, member, score, member …; the members must be new to the set.
local function zset_add(key, pairs)
  call('ZADD', key, unpack(pairs))
  local inverse = { call, 'ZREM', key }
  for i = 2, #pairs, 2 do inverse[#inverse + 1] = pairs[i] end
  undo[#undo + 1] = inverse
end

-- `pairs` is score, member, … as they are in the set now.
local function zset_remove(key, pairs)
  local members = {}
  for i = 2, #pairs, 2 do members[#members + 1] = pairs[i] end
  call('ZREM', key, unpack(members))
  undo[#undo + 1] = { call, 'ZADD', key, unpack(pairs) }
end

local function zset_move(key, member, from, to)
  call('ZADD', key, to, member)
  undo[#undo + 1] = from and { call, 'ZADD', key, from, member } or { call, 'ZREM', key, member }
end

-- Nothing counted is no field.
local function count_up(key, field, by)
  local count = call('HINCRBY', key, field, by)
  undo[#undo + 1] = { count_up, key, field, -by }
  if count == 0 then call('HDEL', key, field) end
end
