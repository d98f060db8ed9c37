--! ranked_locked: report whether an entry of a ranked queue is locked.
--! KEYS    queue
--! ARGV    id
--! RETURNS 1 | 0
--! EFFECTS none
--! COST    O(1)
--! FLAGS   no-writes
--@ include ranked
return call('EXISTS', lock_key(id))
