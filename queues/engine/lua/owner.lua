--! owner: whose task an id is, in this partition. For the platform's operators, who are given an id and no tenant.
--! KEYS    due
--! ARGV    root id
--! RETURNS "<tid>:<command>" | nothing
--! EFFECTS none
--! COST    O(1)
--! FLAGS   no-writes
--@ include keys
local _ = due -- routes the call to the partition's slot
return call('HGET', task_key(id), 'queue') or ''
