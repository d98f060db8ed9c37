--! ranked_size: count the ready and delayed entries of a ranked queue.
--! KEYS    queue
--! ARGV    clock
--! RETURNS size
--! EFFECTS none
--! COST    O(log entries)
--! FLAGS   no-writes
--@ include now, ranked
return call('ZCARD', queue) - call('ZCOUNT', queue, format_exact(HELD + (now_ms() + 1) * 101), '+inf')
