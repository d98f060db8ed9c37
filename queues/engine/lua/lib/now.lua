-- Returns the time of Redis, the only clock for leases, delays and retention. Only tests pass `clock`.
local function now_ms()
  if clock ~= '' then return tonumber(clock) end
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
