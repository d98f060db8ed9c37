-- `retention_ms`: how long what has ended stays, and behind it " <command>=<ms>" of each queue that has its own way.
local function kept_ms(queue)
  local _, at = string.find(retention_ms, ' ' .. command_of(queue) .. '=', 1, true)
  return tonumber(string.match(retention_ms, '^%d+', (at or 0) + 1))
end
