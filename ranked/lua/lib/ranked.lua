-- A ranked queue is one sorted set, and the score says where an entry is: whole numbers below 2^53, exact in a double.
--   in line   (100 - rank) * 1e13 + ms           ms: when it came, or the next free one of its rank where many came
--   delayed   2e15 + ms * 101 + (100 - rank)     ms: when it is due
--   held      4e15 + ms * 101 + (100 - rank)     ms: when its lock ends
-- So an entry is in one place, whatever happens, and who is delayed stands in nobody's way.
local DELAYED, HELD = 2e15, 4e15

local function lock_key(id) return line .. ':lock:' .. id end

-- What `..` makes of a number this large is rounded.
local function exactly(number) return string.format('%.0f', number) end

local function rank_in_line(score) return math.max(0, math.min(100, 100 - math.floor(score / 1e13))) end

local function hidden(band, ms, rank) return band + ms * 101 + 100 - rank end
local function rank_of_hidden(band, score) return 100 - (score - band) % 101 end

-- The place at the back of a rank.
local function back_of(rank, ms)
  local first = (100 - rank) * 1e13
  local last = call('ZREVRANGEBYSCORE', line, '(' .. exactly(first + 1e13), exactly(first), 'WITHSCORES', 'LIMIT', 0, 1)
  return math.max(first + ms, last[2] and math.floor(last[2]) + 1 or 0)
end

-- What is due, and what was held by a lock that is over, joins the line.
local function settle(now, limit)
  for _, band in ipairs({ DELAYED, HELD }) do
    local over = '(' .. exactly(band + (now + 1) * 101)
    local found = call('ZRANGEBYSCORE', line, exactly(band), over, 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #found, 2 do
      local id, score = found[i], found[i + 1]
      local rank, left = rank_of_hidden(band, score), -2
      if band == HELD then left = call('PTTL', lock_key(id)) end
      if left == -2 then
        zset_move(line, id, score, back_of(rank, math.floor((score - band) / 101)))
      else -- it ends in this very millisecond; or somebody has changed it by hand
        zset_move(line, id, score, hidden(HELD, now + math.max(left, 1000), rank))
      end
    end
  end
end
