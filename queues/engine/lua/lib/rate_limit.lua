-- A rate limit (GCRA) is stored as one number: the time until which all admitted requests are paid for. A request is
-- admitted while that time is less than a burst in the future, and then pays its full price: a batch larger than the
-- burst passes once, and the next one waits. `limits` is "<key> <ms per unit> <burst ms>" for each bucket.
-- Returns the buckets, or nil and the milliseconds to wait.
local function check_limits(limits, now)
  local buckets, wait = {}, 0
  for key, price, burst in string.gmatch(limits, '(%S+) (%S+) (%S+)') do
    local before = call('GET', key)
    local paid = math.max(tonumber(before or now), now)
    wait = math.max(wait, paid - now - burst)
    if paid - now >= tonumber(burst) then wait = math.max(wait, 1) end
    buckets[#buckets + 1] = { key, before, paid, price }
  end
  if wait > 0 then return nil, math.ceil(wait) end
  return buckets, 0
end

local function charge_buckets(buckets, count, now)
  for _, bucket in ipairs(buckets) do
    local key, before, paid, price = unpack(bucket, 1, 4)
    paid = paid + price * count -- a float: at a million units per second, each costs one microsecond
    string_set(key, before, string.format('%.6f', paid), 'PX', math.ceil(paid - now) + 1000)
  end
end
