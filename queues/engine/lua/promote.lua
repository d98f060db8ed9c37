--! promote: make the due tasks of one queue ready.
--! KEYS    due waiting woken
--! ARGV    root queue limit clock
--! RETURNS moved next_due_ms
--! EFFECTS delayed -n, ready +n, behind the other tasks of the same priority
--! COST    O(due · log delayed)
--! FLAGS   allow-oom
--@ include keys, write, now, due, wake, promote
local now = now_ms()
local moved = promote_due(queue, now, limit)
return { moved, refresh_due(queue) or 0 }
