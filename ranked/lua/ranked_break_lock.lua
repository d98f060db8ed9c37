--! ranked_break_lock: remove the lock of any holder, and make the entry ready again.
--! KEYS    queue
--! ARGV    id clock
--! RETURNS 1 | 0;
--! RETURNS 0: the entry is not locked
--! EFFECTS lock deleted; held -1; ready +1; an entry that was enqueued again since stays ready
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
if not call('GET', lock_key(id)) then return 0 end
local score = call('ZSCORE', queue, id)
if score and tonumber(score) >= HELD then
  zset_move(queue, id, score, next_score(rank_of_hidden(HELD, score), now_ms()))
end
call('DEL', lock_key(id))
return 1
