--! policy: tell the scripts of a queue's policy.
--! KEYS    queues policies tenants
--! ARGV    tid command line most topic
--! RETURNS 1
--! EFFECTS policies[command] = "<backoff> <base ms> <cap ms> <queue that takes the dead>", none if line is '';
--! EFFECTS queues[command] = its state and behind it how many tasks may be in progress, '' = any number; topic is a queue
--! COST    O(1)
--! FLAGS   allow-oom
--@ include write
local before = call('HMGET', queues, command, topic ~= '' and topic or command)
local was = call('HGET', policies, command)
local state = before[1] and string.match(before[1], '^%a+') or 'active'
call('SADD', tenants, tid) -- it may be the tenant's first queue
-- decided; only writes below
hash_set(queues, { command }, { before[1] }, command, most ~= '' and state .. ' ' .. most or state)
if not before[2] and topic ~= '' then hash_set(queues, { topic }, {}, topic, 'active') end
if line ~= '' then
  hash_set(policies, { command }, { was }, command, line)
elseif was then
  call('HDEL', policies, command)
end
return 1
