--! ranked_requeue: give an entry back; it joins the line again, at its rank, after a delay.
--! KEYS    line
--! ARGV    id holder delay_ms clock
--! RETURNS 1 | 0
--! RETURNS 0: the lock is somebody else's, or over
--! EFFECTS lock gone; held -1, delayed +1. What was enqueued again meanwhile stays in line
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
if call('GET', lock_key(id)) ~= holder then return 0 end
local score = call('ZSCORE', line, id)
if score and tonumber(score) >= HELD then
  zset_move(line, id, score, hidden(DELAYED, now_ms() + delay_ms, rank_of_hidden(HELD, score)))
end
call('DEL', lock_key(id))
return 1
