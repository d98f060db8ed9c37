--! ranked_renew: extend a lock.
--! KEYS    queue
--! ARGV    id holder lock_seconds clock
--! RETURNS 1 | 0;
--! RETURNS 0: another holder has the lock, or it has expired
--! EFFECTS the lock expires lock_seconds from now
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
if call('GET', lock_key(id)) ~= holder then return 0 end
local score = call('ZSCORE', queue, id)
if score and tonumber(score) >= HELD then
  zset_move(queue, id, score, hidden_score(HELD, now_ms() + lock_seconds * 1000, rank_of_hidden(HELD, score)))
end
call('EXPIRE', lock_key(id), lock_seconds)
return 1
