--! ranked_requeue: release a lock; the entry is ready at its rank again after a delay.
--! KEYS    queue
--! ARGV    id holder delay_ms clock
--! RETURNS 1 | 0;
--! RETURNS 0: another holder has the lock, or it has expired
--! EFFECTS lock deleted; held -1, delayed +1; an entry that was enqueued again since stays ready
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
if call('GET', lock_key(id)) ~= holder then return 0 end
local score = call('ZSCORE', queue, id)
if score and tonumber(score) >= HELD then
  zset_move(queue, id, score, hidden_score(DELAYED, now_ms() + delay_ms, rank_of_hidden(HELD, score)))
end
call('DEL', lock_key(id))
return 1
