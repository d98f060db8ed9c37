--! ranked_size: how many entries of a ranked queue nobody holds, the delayed among them.
--! KEYS    line
--! ARGV    clock
--! RETURNS size
--! EFFECTS none
--! COST    O(log entries)
--! FLAGS   no-writes
--@ include now, ranked
return call('ZCARD', line) - call('ZCOUNT', line, exactly(HELD + (now_ms() + 1) * 101), '+inf')
