--! ranked_release: remove a finished entry and its lock; for holder '', break any lock and make the entry ready again.
--! KEYS    queue
--! ARGV    id holder clock
--! RETURNS 1 | 0;
--! RETURNS 0: another holder has the lock, or it has expired
--! EFFECTS lock deleted; held -1; ready +1 if broken; an entry that was enqueued again since stays ready
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
local lock = call('GET', lock_key(id))
if not lock or holder ~= '' and lock ~= holder then return 0 end
local score = call('ZSCORE', queue, id)
if score and tonumber(score) >= HELD then
  if holder == '' then
    zset_move(queue, id, score, next_score(rank_of_hidden(HELD, score), now_ms()))
  else
    zset_remove(queue, { score, id })
  end
end
call('DEL', lock_key(id))
return 1
