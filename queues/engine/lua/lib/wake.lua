-- Announces that a queue has ready tasks again: through the set `woken` to worker notifications, and through the wake
-- channel to a long poll that waits for the queue. Both are hints that may be wrong, so they are not rolled back.
local function wake_waiters(queue, now)
  call('SADD', woken, queue)
  local waiting_until = call('ZSCORE', waiting, queue)
  if not waiting_until then return end
  if tonumber(waiting_until) > now then
    call('PUBLISH', root .. 'wake', 'ready ' .. queue)
  else
    call('ZREM', waiting, queue)
  end
end
