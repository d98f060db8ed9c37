--! ranked_dequeue: take the first entry of a ranked queue whose lock is free, and lock it.
--! KEYS    line
--! ARGV    holder lock_seconds skip limit clock
--! RETURNS TAKEN id dropped | MORE skip dropped | EMPTY 0 dropped
--! RETURNS MORE: all that could be looked at in one script is locked; ask again, and skip so many
--! EFFECTS lock set; in line -1, held +1; what is due joins the line first; entries that are no ids are dropped
--! COST    O((1 + locked ones before it) · log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
local now = now_ms()
local offset, dropped, looked, page = tonumber(skip), 0, 0, 1
settle(now, limit)
while looked < tonumber(limit) do
  local found = call('ZRANGEBYSCORE', line, '-inf', '(' .. exactly(DELAYED), 'WITHSCORES', 'LIMIT', offset, page)
  if #found == 0 then return { 'EMPTY', 0, dropped } end
  for i = 1, #found, 2 do
    local id, score = found[i], found[i + 1]
    looked = looked + 1
    if #id > 128 or not string.find(id, '^[%w_.-]+$') then
      zset_remove(line, { score, id })
      dropped = dropped + 1
    elseif call('EXISTS', lock_key(id)) == 1 then -- enqueued again while somebody is at it: it keeps its score
      offset = offset + 1
    else
      zset_move(line, id, score, hidden(HELD, now + lock_seconds * 1000, rank_in_line(score)))
      string_set(lock_key(id), false, holder, 'NX', 'EX', lock_seconds)
      return { 'TAKEN', id, dropped }
    end
  end
  page = 100
end
return { 'MORE', offset, dropped }
