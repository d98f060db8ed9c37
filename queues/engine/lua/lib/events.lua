-- Adds an entry to the stream that feeds the audit and the webhooks, for each ended attempt, ended task and change of a
-- dead letter (replayed or deleted, or its replay was undone).
-- `attempt` counts over the whole life of the task, including replays; 0 if the task was not in progress.
local function record_event(id, queue, attempt, outcome, status, attempts, priority, lease, created, visible, now,
  error_text)
  local entry = call('XADD', events, '*', 'id', id, 'queue', queue, 'attempt', attempt, 'outcome', outcome,
    'status', status, 'attempts', attempts, 'priority', priority, 'worker', worker_of(lease) or '', 'created', created,
    'visible', visible or created, 'claimed', claimed_of(lease) or 0, 'ended', now, 'error', error_text or '')
  log_inverse('entry', events, entry)
end

-- Publishes the end of tasks. Callers publish only tasks with the field `awaited`, which a request sets before it waits
-- for the result. Tasks without such a request cost no PUBLISH.
local function announce_ends(ids)
  for _, id in ipairs(ids) do call('PUBLISH', root .. 'wake', 'ended ' .. id) end
end
