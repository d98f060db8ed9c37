--! promote: make the due tasks of one queue ready.
--! KEYS    due waiting woken
--! ARGV    root queue limit clock
--! RETURNS moved next_due_ms
--! EFFECTS delayed -n, ready +n, at the back of each task's priority
--! COST    O(due · log delayed), whatever is delayed
--! FLAGS   allow-oom
--@ include keys, write, now, due, wake, promote
local now = now_ms()
local moved = promote_due(queue, now, limit)
return { moved, reschedule(queue) or 0 }
