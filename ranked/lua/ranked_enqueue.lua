--! ranked_enqueue: add entries to a ranked queue, each behind the others of its rank.
--! KEYS    queue
--! ARGV    clock {id rank}*
--! RETURNS {1 | 0}*;
--! RETURNS 0: the entry is ready already, at this rank or a higher one, and keeps its position
--! EFFECTS ready +n; delayed and held entries become ready; a held one can be dequeued once its lock is released
--! COST    O(n · log entries)
--@ include write, now, ranked
local now = now_ms()
local reply = {}
make_due_ready(now, 1000)
for i = args_from, #ARGV, 2 do
  local id, rank = ARGV[i], tonumber(ARGV[i + 1])
  local score = call('ZSCORE', queue, id)
  if score and tonumber(score) < DELAYED and rank_of_ready(score) >= rank then
    reply[#reply + 1] = 0
  else
    zset_move(queue, id, score, next_score(rank, now))
    reply[#reply + 1] = 1
  end
end
return reply
