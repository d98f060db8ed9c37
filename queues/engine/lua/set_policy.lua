--! set_policy: store the part of a queue's policy that the scripts need.
--! KEYS    queues policies tenants
--! ARGV    tid command line most topic
--! RETURNS 1
--! EFFECTS policies[command] = line = "<backoff> <base ms> <cap ms> <dead letter queue>", removed if line is '';
--! EFFECTS queues[command] = its state and most, the limit of tasks in progress ('' = no limit); the queue topic exists
--! COST    O(1)
--! FLAGS   allow-oom
--@ include write
local states = call('HMGET', queues, command, topic ~= '' and topic or command)
local policy_before = call('HGET', policies, command)
local state = states[1] and string.match(states[1], '^%a+') or 'active'
call('SADD', tenants, tid) -- this may be the tenant's first queue
-- decided; only writes below
hash_set(queues, { command }, { states[1] }, command, most ~= '' and state .. ' ' .. most or state)
if not states[2] and topic ~= '' then hash_set(queues, { topic }, {}, topic, 'active') end
if line ~= '' then
  hash_set(policies, { command }, { policy_before }, command, line)
elseif policy_before then
  call('HDEL', policies, command)
end
return 1
