--! due_queues: list the queues of a partition that may have due tasks or expired leases, longest due first.
--! KEYS    due
--! ARGV    limit clock
--! RETURNS {queue}*
--! EFFECTS none
--! COST    O(log queues + limit)
--! FLAGS   no-writes
--@ include now
return call('ZRANGEBYSCORE', due, '-inf', now_ms(), 'LIMIT', 0, limit)
