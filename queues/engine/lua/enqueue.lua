--! enqueue: store tasks of one queue and one priority, ready at once or delayed.
--! KEYS    ready delayed due queues tenants waiting woken
--! ARGV    root tid queue priority clock idem_ttl_ms horizon_ms limits max_depth {id spec max delay_ms run_at_ms digest fingerprint}*
--! RETURNS now_ms wait_ms {visible_ms | TOO_FAR | LIMITED | FULL | {same task…}}*;
--! RETURNS a list for the existing task of an idempotency key, with same = 1 if the request is identical;
--! RETURNS LIMITED or FULL for every new task: the script then stores no task
--! EFFECTS task created; ready +n, delayed +n; idem mapping; the queue is created with its first task
--! COST    O(n), or O(n · log delayed) for delayed tasks
--@ include keys, write, now, due, wake, rate_limit
--@ lazy task_reader(read_task): task
--@ lazy depth_counter(count_waiting_tasks): depth
local now = now_ms()
local reply, new, ready_ids, delayed_entries, first_due = { now, 0 }, {}, {}, {}, nil
for i = args_from, #ARGV, 7 do
  local id, digest = ARGV[i], ARGV[i + 5]
  local mapped_id = digest ~= '' and call('GET', idem_key(tid, digest))
  local existing = mapped_id and mapped_id ~= id and task_reader()(mapped_id)
  -- A script is sent again when its reply was lost: its tasks may be stored already, and even claimed.
  if not existing and call('EXISTS', task_key(id)) == 1 then
    local stored = call('HMGET', task_key(id), 'created', 'visible')
    local created, visible = stored[1], stored[2]
    reply[#reply + 1] = tonumber(visible or created)
  elseif existing then
    local fingerprint = call('HGET', task_key(mapped_id), 'fingerprint')
    reply[#reply + 1] = { fingerprint == ARGV[i + 6] and 1 or 0, unpack(existing) }
  else
    local visible = tonumber(ARGV[i + 4])
    if visible == 0 then visible = now + ARGV[i + 3] end
    visible = math.max(visible, now)
    if visible - now > tonumber(horizon_ms) then
      reply[#reply + 1] = 'TOO_FAR'
    else
      if visible == now then
        ready_ids[#ready_ids + 1] = id
      else
        delayed_entries[#delayed_entries + 1], delayed_entries[#delayed_entries + 2] = visible, id
        if not first_due or visible < first_due then first_due = visible end
      end
      reply[#reply + 1] = visible
      new[#new + 1] = { i, visible, mapped_id, #reply }
    end
  end
end
local buckets, refusal
if limits ~= '' and #new > 0 then
  buckets, reply[2] = check_limits(limits, now)
  if not buckets then refusal = 'LIMITED' end
end
if max_depth ~= '' and depth_counter()() + #new > tonumber(max_depth) then refusal = 'FULL' end
if refusal then
  for _, task in ipairs(new) do
    local position = task[4]
    reply[position] = refusal
  end
  return reply
end
local is_known_queue = call('HEXISTS', queues, command_of(queue)) == 1
-- All checks are done; only writes follow.
if buckets then charge_buckets(buckets, #new, now) end
for _, task in ipairs(new) do
  local i, visible, mapped_id = task[1], task[2], task[3]
  local id, spec, max_attempts, digest = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 5]
  local key = task_key(id)
  if digest ~= '' then
    create(key, 'spec', spec, 'queue', queue, 'priority', priority, 'max', max_attempts, 'status', 'PENDING',
      'created', now, 'visible', visible, 'idem', digest, 'fingerprint', ARGV[i + 6])
    string_set(idem_key(tid, digest), mapped_id, id, 'PX', idem_ttl_ms)
  elseif visible > now then
    create(key, 'spec', spec, 'queue', queue, 'priority', priority, 'max', max_attempts, 'status', 'PENDING',
      'created', now, 'visible', visible)
  else
    create(key, 'spec', spec, 'queue', queue, 'priority', priority, 'max', max_attempts, 'status', 'PENDING',
      'created', now)
  end
end
if #new > 0 and not is_known_queue then
  hash_set(queues, { command_of(queue) }, {}, command_of(queue), 'active')
  call('SADD', tenants, tid) -- not rolled back: a tenant without queues is harmless here
  -- Announce the new queue: a long poll on all queues of the tenant that began earlier does not include it.
  call('PUBLISH', root .. 'wake', 'queue ' .. queue)
end
if first_due then
  zset_add(delayed, delayed_entries)
  mark_due_by(queue, first_due)
end
if #ready_ids > 0 and push(ready, ready_ids) == #ready_ids then wake_waiters(queue, now) end
return reply
