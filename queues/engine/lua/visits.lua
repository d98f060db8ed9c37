--! visits: the queues of a partition that need a visit now, the longest due first.
--! KEYS    due
--! ARGV    limit clock
--! RETURNS {queue}*
--! EFFECTS none
--! COST    O(log queues + limit), whatever is not due
--! FLAGS   no-writes
--@ include now
return call('ZRANGEBYSCORE', due, '-inf', now_ms(), 'LIMIT', 0, limit)
