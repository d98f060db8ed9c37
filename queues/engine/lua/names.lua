--! names: the queues that a tenant has.
--! KEYS    queues
--! ARGV    tid
--! RETURNS {command}*
--! EFFECTS none
--! COST    O(queues of the tenant)
--! FLAGS   no-writes
local _ = tid
return call('HKEYS', queues)
