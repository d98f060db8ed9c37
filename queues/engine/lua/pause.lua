--! pause: stop claims from a queue; enqueues and results are still accepted.
--! KEYS    queues tenants
--! ARGV    tid command
--! RETURNS 1
--! EFFECTS queues[command] = paused
--! COST    O(1)
--! FLAGS   allow-oom
call('SADD', tenants, tid) -- this may be the tenant's first queue
local consumers = string.match(call('HGET', queues, command) or '', ' %d+$') or ''
call('HSET', queues, command, 'paused' .. consumers)
return 1
