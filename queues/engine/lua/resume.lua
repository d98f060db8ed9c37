--! resume: the queue is open to claims again, and a long poll that waits for it looks again.
--! KEYS    queues waiting woken
--! ARGV    root queue command clock
--! RETURNS 1
--! EFFECTS queues[command] = active
--! COST    O(1)
--! FLAGS   allow-oom
--@ include now, wake
call('HSET', queues, command, 'active')
woke(queue, now_ms())
return 1
