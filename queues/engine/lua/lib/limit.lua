-- A rate limit is one number, the moment until which everything admitted so far is paid for. What comes is admitted
-- while that moment is less than a burst ahead, and then pays its whole price: a batch larger than the burst goes
-- through once, and the next one waits. `limits` is "<key> <ms a unit> <burst ms>" for each bucket that counts.
-- Answers the buckets, or nil and how many milliseconds to wait.
local function admitted(limits, now)
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

local function charge(buckets, count, now)
  for _, bucket in ipairs(buckets) do
    local key, before, paid, price = unpack(bucket, 1, 4)
    paid = paid + price * count -- with its fraction: at a million a second each costs a microsecond
    string_set(key, before, string.format('%.6f', paid), 'PX', math.ceil(paid - now) + 1000)
  end
end
