-- Four slots a write: the name of its inverse and that one's words; a table for each would cost more than the rest.
local function remember(inverse, key, a, b)
  local n = #undo
  undo[n + 1], undo[n + 2], undo[n + 3], undo[n + 4] = inverse, key, a, b or false
end

-- `was` holds what `fields` were before, in their order: every field written must be among them.
local function hash_set(key, fields, was, ...)
  call('HSET', key, ...)
  remember('hash', key, fields, was)
end

local function hash_remove(key, field, was)
  call('HDEL', key, field)
  remember('hash', key, { field }, { was })
end

local function create(key, ...)
  call('HSET', key, ...)
  remember('created', key, false)
end

local function string_set(key, before, value, ...)
  call('SET', key, value, ...)
  remember(before and 'string' or 'created', key, before)
end

local function push(key, ids)
  local length = call('LPUSH', key, unpack(ids))
  remember('pushed', key, #ids)
  return length
end

-- Takes ids from the right of the first of `count` lists that is not empty; `words` are the lists and LMPOP's options.
local function pop(count, words)
  local taken = call('LMPOP', count, unpack(words))
  if not taken then return nil end
  remember('popped', taken[1], taken[2])
  return taken[1], taken[2]
end

-- `pairs` is score, member, score, member …; the members must be new to the set.
local function zset_add(key, pairs)
  call('ZADD', key, unpack(pairs))
  remember('added', key, pairs)
end

-- `pairs` is score, member, … as they are in the set now.
local function zset_remove(key, pairs)
  if #pairs == 2 then
    call('ZREM', key, pairs[2])
  else
    local members = {}
    for i = 2, #pairs, 2 do members[i / 2] = pairs[i] end
    call('ZREM', key, unpack(members))
  end
  remember('removed', key, pairs)
end

local function zset_move(key, member, from, to)
  call('ZADD', key, to, member)
  remember(from and 'removed' or 'added', key, { from or to, member })
end

-- Nothing counted is no field.
local function count_up(key, field, by)
  local count = call('HINCRBY', key, field, by)
  remember('count', key, field, -by)
  if count == 0 then call('HDEL', key, field) end
end
