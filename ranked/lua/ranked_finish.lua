--! ranked_finish: remove a finished entry and its lock.
--! KEYS    queue
--! ARGV    id holder
--! RETURNS 1 | 0;
--! RETURNS 0: another holder has the lock, or it has expired
--! EFFECTS lock deleted; held -1; an entry that was enqueued again since stays ready
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, ranked
if call('GET', lock_key(id)) ~= holder then return 0 end
local score = call('ZSCORE', queue, id)
if score and tonumber(score) >= HELD then zset_remove(queue, { score, id }) end
call('DEL', lock_key(id))
return 1
