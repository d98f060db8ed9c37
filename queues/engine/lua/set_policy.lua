--! set_policy: store the part of a queue's policy that the scripts need.
--! KEYS    queues policies tenants
--! ARGV    tid command policy max_consumers dead_letter_queue
--! RETURNS 1
--! EFFECTS policies[command] = policy = "<backoff> <base ms> <cap ms> <dead letter queue>", removed if it is '';
--! EFFECTS queues[command] = its state and max_consumers ('' = no limit); the dead letter queue exists
--! COST    O(1)
--! FLAGS   allow-oom
--@ include write
local states = call('HMGET', queues, command, dead_letter_queue ~= '' and dead_letter_queue or command)
local policy_before = call('HGET', policies, command)
local state_before, state_of_dead_letter_queue = states[1], states[2]
local state = state_before and string.match(state_before, '^%a+') or 'active'
call('SADD', tenants, tid) -- this may be the tenant's first queue
-- All checks are done; only writes follow.
hash_set(queues, { command }, { state_before }, command, max_consumers ~= '' and state .. ' ' .. max_consumers or state)
if dead_letter_queue ~= '' and not state_of_dead_letter_queue then
  hash_set(queues, { dead_letter_queue }, {}, dead_letter_queue, 'active')
end
if policy ~= '' then
  hash_set(policies, { command }, { policy_before }, command, policy)
elseif policy_before then
  call('HDEL', policies, command)
end
return 1
