--! ranked_size: count the ready and delayed entries of a ranked queue.
--! KEYS    line
--! ARGV    clock
--! RETURNS size
--! EFFECTS none
--! COST    O(log entries)
--! FLAGS   no-writes
--@ include now, ranked
return call('ZCARD', line) - call('ZCOUNT', line, format_exact(HELD + (now_ms() + 1) * 101), '+inf')
