--! pause: claims take nothing from the queue any more; enqueues and results go on.
--! KEYS    queues tenants
--! ARGV    tid command
--! RETURNS 1
--! EFFECTS queues[command] = paused
--! COST    O(1)
--! FLAGS   allow-oom
call('SADD', tenants, tid) -- it may be the tenant's first queue
local consumers = string.match(call('HGET', queues, command) or '', ' %d+$') or ''
call('HSET', queues, command, 'paused' .. consumers)
return 1
