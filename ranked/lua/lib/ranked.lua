-- A ranked queue is one sorted set. The score of an entry encodes its state, as an integer below 2^53, which a double
-- holds exactly:
--   ready     (100 - rank) * 1e13 + ms           ms: its arrival, or the next free millisecond of its rank
--   delayed   2e15 + ms * 101 + (100 - rank)     ms: when it is due
--   held      4e15 + ms * 101 + (100 - rank)     ms: when its lock expires
-- An entry therefore has exactly one state, and delayed and held entries are never read by a dequeue.
local DELAYED, HELD = 2e15, 4e15

local function lock_key(id) return queue .. ':lock:' .. id end

-- The operator `..` would round a number this large.
local function format_exact(number) return string.format('%.0f', number) end

local function rank_of_ready(score) return math.max(0, math.min(100, 100 - math.floor(score / 1e13))) end

-- The score of an entry that a dequeue does not read. `band` is DELAYED or HELD.
local function hidden_score(band, ms, rank) return band + ms * 101 + 100 - rank end
local function rank_of_hidden(band, score) return 100 - (score - band) % 101 end

-- Returns the score behind the last ready entry of a rank.
local function next_score(rank, ms)
  local first = (100 - rank) * 1e13
  local last = call('ZREVRANGEBYSCORE', queue, '(' .. format_exact(first + 1e13), format_exact(first), 'WITHSCORES',
    'LIMIT', 0, 1)
  return math.max(first + ms, last[2] and math.floor(last[2]) + 1 or 0)
end

-- Makes entries ready: delayed ones that are due, and held ones whose lock has expired.
local function make_due_ready(now, limit)
  for _, band in ipairs({ DELAYED, HELD }) do
    local upper = '(' .. format_exact(band + (now + 1) * 101)
    local entries = call('ZRANGEBYSCORE', queue, format_exact(band), upper, 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #entries, 2 do
      local id, score = entries[i], entries[i + 1]
      local rank = rank_of_hidden(band, score)
      local lock_ms = band == HELD and call('PTTL', lock_key(id)) or -2 -- -2: no lock, as PTTL reports it
      if lock_ms == -2 then
        zset_move(queue, id, score, next_score(rank, math.floor((score - band) / 101)))
      else -- the lock expires in this millisecond, or was changed by hand
        zset_move(queue, id, score, hidden_score(HELD, now + math.max(lock_ms, 1000), rank))
      end
    end
  end
end
