-- `retention_ms` is how long ended tasks are kept, followed by " <command>=<ms>" for each queue with its own retention.
local function retention_of(queue)
  local _, at = string.find(retention_ms, ' ' .. command_of(queue) .. '=', 1, true)
  return tonumber(string.match(retention_ms, '^%d+', (at or 0) + 1))
end
