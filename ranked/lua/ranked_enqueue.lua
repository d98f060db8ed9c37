--! ranked_enqueue: put entries in line in a ranked queue, each at the back of its rank.
--! KEYS    line
--! ARGV    clock {id rank}*
--! RETURNS {1 | 0}*
--! RETURNS 0: it is in line already, at this rank or a higher one, and keeps its place
--! EFFECTS in line +n; what was delayed is in line now; what is held is in line too, for whoever has the lock next
--! COST    O(n · log entries)
--@ include write, now, ranked
local now = now_ms()
local reply = {}
settle(now, 1000)
for i = args_from, #ARGV, 2 do
  local id, rank = ARGV[i], tonumber(ARGV[i + 1])
  local score = call('ZSCORE', line, id)
  if score and tonumber(score) < DELAYED and rank_in_line(score) >= rank then
    reply[#reply + 1] = 0
  else
    zset_move(line, id, score, back_of(rank, now))
    reply[#reply + 1] = 1
  end
end
return reply
