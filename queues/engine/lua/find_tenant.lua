--! find_tenant: find the tenant of a task in this partition, for an operator who has only the task's id.
--! KEYS    due
--! ARGV    root id
--! RETURNS "<tid>:<command>" | ""
--! EFFECTS none
--! COST    O(1)
--! FLAGS   no-writes
--@ include keys
local _ = due -- routes the call to the partition's slot
return call('HGET', task_key(id), 'queue') or ''
