-- One entry per ended attempt and per terminal transition: the outbox that audit and webhooks are fed from.
-- `attempt` counts over the whole life of the task, replays included; 0 = nobody was working on it.
local function record(id, queue, attempt, outcome, status, attempts, priority, lease, created, visible, now, problem)
  local entry = call('XADD', events, '*', 'id', id, 'queue', queue, 'attempt', attempt, 'outcome', outcome, 'status', status,
    'attempts', attempts, 'priority', priority, 'worker', worker_of(lease) or '', 'created', created,
    'visible', visible or created, 'claimed', claimed_of(lease) or 0, 'ended', now, 'error', problem or '')
  remember('entry', events, entry)
end

-- Whoever waits for the task's result set `awaited` on it; nobody else is told, so a busy queue publishes nothing.
local function announce(ids)
  for _, id in ipairs(ids) do call('PUBLISH', root .. 'wake', 'ended ' .. id) end
end
