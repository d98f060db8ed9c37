-- Checks that a worker may act on a leased task: it is a task of the tenant, the worker holds its lease, the token, if
-- given, is that of the claim, and the lease has not expired. A task of another tenant is reported as not found.
-- Returns nil and the deadline, or the reason for the refusal.
local function check_lease(id, queue, status, lease, worker, token, now)
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
