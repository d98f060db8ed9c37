--! ranked_dequeue: lock the first ready entry of a ranked queue that is not locked.
--! KEYS    queue
--! ARGV    holder lock_seconds skip limit clock
--! RETURNS TAKEN id dropped | MORE skip dropped | EMPTY 0 dropped;
--! RETURNS MORE: the first `limit` entries are locked; call again with this skip
--! EFFECTS lock set; ready -1, held +1; due entries become ready first; invalid ids are dropped
--! COST    O((1 + locked entries before it) · log entries)
--! FLAGS   allow-oom
--@ include write, now, ranked
local now = now_ms()
local offset, dropped, examined = tonumber(skip), 0, 0
local page_size = 1 -- the first entry is rarely locked
make_due_ready(now, limit)
while examined < tonumber(limit) do
  local entries = call('ZRANGEBYSCORE', queue, '-inf', '(' .. format_exact(DELAYED), 'WITHSCORES', 'LIMIT', offset,
    page_size)
  if #entries == 0 then return { 'EMPTY', 0, dropped } end
  for i = 1, #entries, 2 do
    local id, score = entries[i], entries[i + 1]
    examined = examined + 1
    if #id > 128 or not string.find(id, '^[%w_.-]+$') then
      zset_remove(queue, { score, id })
      dropped = dropped + 1
    elseif call('EXISTS', lock_key(id)) == 1 then -- enqueued again while it is locked: it keeps its score
      offset = offset + 1
    else
      zset_move(queue, id, score, hidden_score(HELD, now + lock_seconds * 1000, rank_of_ready(score)))
      string_set(lock_key(id), false, holder, 'NX', 'EX', lock_seconds)
      return { 'TAKEN', id, dropped }
    end
  end
  page_size = 100
end
return { 'MORE', offset, dropped }
