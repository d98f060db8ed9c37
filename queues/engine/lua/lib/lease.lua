-- `lease` of a task: "<claimed ms> <token> <worker>" of its last claim. It stays when the lease ends, and means nothing
-- then: a lease lives while the task is IN_PROGRESS and its id is in `inprog` with a deadline to come.
local function lease_of(claimed, token, worker) return claimed .. ' ' .. token .. ' ' .. worker end
local function claimed_of(lease) return lease and string.sub(lease, 1, 13) end
local function token_of(lease) return lease and string.sub(lease, 15, 46) end
local function worker_of(lease) return lease and string.sub(lease, 48) end
