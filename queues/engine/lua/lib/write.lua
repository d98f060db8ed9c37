-- Each write takes four slots of `undo`: the name of its inverse and three arguments. A table per write would cost more
-- than the rest of the function.
local function log_inverse(inverse, key, first, second)
  local n = #undo
  undo[n + 1], undo[n + 2], undo[n + 3], undo[n + 4] = inverse, key, first, second or false
end

-- `before` holds the previous values of `fields`, in their order. `fields` must include every field that is written.
local function hash_set(key, fields, before, ...)
  call('HSET', key, ...)
  log_inverse('hash', key, fields, before)
end

local function hash_remove(key, field, before)
  call('HDEL', key, field)
  log_inverse('hash', key, { field }, { before })
end

local function create(key, ...)
  call('HSET', key, ...)
  log_inverse('created', key, false)
end

local function string_set(key, before, value, ...)
  call('SET', key, value, ...)
  log_inverse(before and 'string' or 'created', key, before)
end

local function push(key, ids)
  local length = call('LPUSH', key, unpack(ids))
  log_inverse('pushed', key, #ids)
  return length
end

-- Pops ids from the right of the first non-empty list; `options` are the `count` lists and other arguments of LMPOP.
local function pop(count, options)
  local popped = call('LMPOP', count, unpack(options))
  if not popped then return nil end
  log_inverse('popped', popped[1], popped[2])
  return popped[1], popped[2]
end

-- `entries` is score, member, score, member, …; the set must not contain the members yet.
local function zset_add(key, entries)
  call('ZADD', key, unpack(entries))
  log_inverse('added', key, entries)
end

-- `entries` is score, member, … as they are stored in the set.
local function zset_remove(key, entries)
  if #entries == 2 then
    call('ZREM', key, entries[2])
  else
    local members = {}
    for i = 2, #entries, 2 do members[i / 2] = entries[i] end
    call('ZREM', key, unpack(members))
  end
  log_inverse('removed', key, entries)
end

-- Sets the score of a member. `from` is its previous score, or false if the set does not contain it.
local function zset_move(key, member, from, to)
  call('ZADD', key, to, member)
  log_inverse(from and 'removed' or 'added', key, { from or to, member })
end

-- Adds `by` to a counter in a hash, and removes the field at zero.
local function counter_add(key, field, by)
  local count = call('HINCRBY', key, field, by)
  log_inverse('count', key, field, -by)
  if count == 0 then call('HDEL', key, field) end
end
