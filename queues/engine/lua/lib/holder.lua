-- Who may act on a leased task: the tenant it belongs to, the worker that holds it, with the token of that very claim,
-- while the lease lives. A task of another tenant answers as one that does not exist.
-- Answers nil and the deadline, or the word for what is wrong.
local function refusal(id, queue, status, lease, token, now)
  if not queue or string.sub(queue, 1, #tid + 1) ~= tid .. ':' then return 'NOT_FOUND' end
  if status == 'CANCELLED' then return 'CANCELLED' end
  if status == 'COMPLETED' or status == 'FAILED' then return 'ENDED' end
  if status ~= 'IN_PROGRESS' then return 'LEASE_LOST' end
  if worker_of(lease) ~= worker then return 'NOT_OWNER' end
  if token ~= '' and token ~= token_of(lease) then return 'LEASE_LOST' end
  local deadline = call('ZSCORE', queue_key(queue, 'inprog'), id)
  if not deadline or tonumber(deadline) <= now then return 'LEASE_LOST' end
  return nil, deadline
end
