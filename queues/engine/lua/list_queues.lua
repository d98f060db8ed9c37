--! list_queues: list the queues of a tenant.
--! KEYS    queues
--! ARGV    tid
--! RETURNS {command}*
--! EFFECTS none
--! COST    O(queues of the tenant)
--! FLAGS   no-writes
local _ = tid
return call('HKEYS', queues)
