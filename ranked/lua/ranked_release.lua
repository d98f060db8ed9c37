--! ranked_release: give up a lock, as the entry is done with; or break it, and the entry is in line again.
--! KEYS    line
--! ARGV    id holder clock
--! RETURNS 1 | 0
--! RETURNS 0: the lock is somebody else's, or over. No holder: whoever has it loses it
--! EFFECTS lock gone; held -1; broken: in line +1. What was enqueued again meanwhile stays in line
--! COST    O(log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
local has = call('GET', lock_key(id))
if not has or holder ~= '' and has ~= holder then return 0 end
local score = call('ZSCORE', line, id)
if score and tonumber(score) >= HELD then
  if holder == '' then
    zset_move(line, id, score, back_of(rank_of_hidden(HELD, score), now_ms()))
  else
    zset_remove(line, { score, id })
  end
end
call('DEL', lock_key(id))
return 1
