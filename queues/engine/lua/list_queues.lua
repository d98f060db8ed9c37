--! list_queues: list a part of the queues of a tenant.
--! KEYS    queues
--! ARGV    tid cursor limit
--! RETURNS cursor {command state}*    cursor of the next part, '0' after the last one; a command may occur twice
--! EFFECTS none
--! COST    O(limit)
--! FLAGS   no-writes
local _ = tid
return call('HSCAN', queues, cursor, 'COUNT', limit)
