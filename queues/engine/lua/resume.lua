--! resume: allow claims from a queue again, and wake a long poll that waits for it.
--! KEYS    queues tenants waiting woken
--! ARGV    root tid queue command clock
--! RETURNS 1
--! EFFECTS queues[command] = active
--! COST    O(1)
--! FLAGS   allow-oom
--@ include now, wake
local now = now_ms()
call('SADD', tenants, tid)
wake_waiters(queue, now)
local consumers = string.match(call('HGET', queues, command) or '', ' %d+$') or ''
call('HSET', queues, command, 'active' .. consumers)
return 1
