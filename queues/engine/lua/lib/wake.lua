-- A ready list turned non-empty: worker notifications learn of it from `woken`, and a parked long poll, if there is
-- one, from the channel. Advisory both, so they are not taken back by `run`.
local function woke(queue, now)
  call('SADD', woken, queue)
  local parked_until = call('ZSCORE', waiting, queue)
  if not parked_until then return end
  if tonumber(parked_until) > now then
    call('PUBLISH', root .. 'wake', 'ready ' .. queue)
  else
    call('ZREM', waiting, queue)
  end
end
