-- The field `lease` of a task is "<claimed ms> <token> <worker>" of its last claim. It is kept when the lease ends. A
-- lease is valid only while the task is IN_PROGRESS and its deadline in `inprog` is in the future.
local function format_lease(claimed, token, worker) return claimed .. ' ' .. token .. ' ' .. worker end
local function claimed_of(lease) return lease and string.sub(lease, 1, 13) end
local function token_of(lease) return lease and string.sub(lease, 15, 46) end
local function worker_of(lease) return lease and string.sub(lease, 48) end
