--! pause: claims take nothing from the queue any more; enqueues and results go on.
--! KEYS    queues
--! ARGV    command
--! RETURNS 1
--! EFFECTS queues[command] = paused
--! COST    O(1)
--! FLAGS   allow-oom
call('HSET', queues, command, 'paused')
return 1
