-- A rate limit is a GCRA. Its state is one number, the theoretical arrival time (TAT) of the next request. A request is
-- admitted while the TAT is less than a burst in the future, and then moves it by its full cost: a batch larger than the
-- burst is admitted once, and the next one waits. `limits` is "<key> <ms per unit> <burst ms>" for each bucket.
-- Returns the buckets, or nil and the milliseconds to wait.
local function check_limits(limits, now)
  local buckets, wait = {}, 0
  for key, price, burst in string.gmatch(limits, '(%S+) (%S+) (%S+)') do
    local before = call('GET', key)
    local tat = math.max(tonumber(before or now), now)
    wait = math.max(wait, tat - now - burst)
    if tat - now >= tonumber(burst) then wait = math.max(wait, 1) end
    buckets[#buckets + 1] = { key, before, tat, price }
  end
  if wait > 0 then return nil, math.ceil(wait) end
  return buckets, 0
end

local function charge_buckets(buckets, count, now)
  for _, bucket in ipairs(buckets) do
    local key, before, tat, price = unpack(bucket, 1, 4)
    tat = tat + price * count -- a float: at a million units per second, each costs one microsecond
    string_set(key, before, string.format('%.6f', tat), 'PX', math.ceil(tat - now) + 1000)
  end
end
