--! enqueue: store tasks of one queue and one priority, ready at once or delayed.
--! KEYS    ready delayed due queues tenants waiting woken
--! ARGV    root tid queue priority clock idem_ttl_ms horizon_ms limits depth {id spec max delay_ms run_at_ms digest fingerprint}*
--! RETURNS now_ms wait_ms {visible_ms | TOO_FAR | LIMITED | FULL | {same task…}}*
--! RETURNS a list where the key had made a task before; LIMITED and FULL stand at all new ones, and none is stored
--! EFFECTS task created; ready +n, delayed +n; idem mapping; the queue is known from now on
--! COST    O(n), O(n · log delayed) for delayed ones
--@ include keys, write, now, due, wake
--@ lazy reading(shown): task
--@ lazy limiter(admitted, charge): limit
--@ lazy counting(waiting_tasks): depth
local now = now_ms()
local reply, new, at_once, later, first = { now, 0 }, {}, {}, {}, nil
for i = args_from, #ARGV, 7 do
  local id, digest = ARGV[i], ARGV[i + 5]
  local known = digest ~= '' and call('GET', idem_key(tid, digest))
  local existing = known and known ~= id and reading()(known)
  -- A client that lost the answer sends the same script again: what it asked for is there, perhaps claimed by now.
  if not existing and call('EXISTS', task_key(id)) == 1 then
    local stored = call('HMGET', task_key(id), 'created', 'visible')
    reply[#reply + 1] = tonumber(stored[2] or stored[1])
  elseif existing then
    local fingerprint = call('HGET', task_key(known), 'fingerprint')
    reply[#reply + 1] = { fingerprint == ARGV[i + 6] and 1 or 0, unpack(existing) }
  else
    local visible = tonumber(ARGV[i + 4])
    if visible == 0 then visible = now + ARGV[i + 3] end
    visible = math.max(visible, now)
    if visible - now > tonumber(horizon_ms) then
      reply[#reply + 1] = 'TOO_FAR'
    else
      if visible == now then
        at_once[#at_once + 1] = id
      else
        later[#later + 1], later[#later + 2] = visible, id
        if not first or visible < first then first = visible end
      end
      reply[#reply + 1] = visible
      new[#new + 1] = { i, visible, known, #reply }
    end
  end
end
local buckets, charge, refused
if limits ~= '' and #new > 0 then
  local admitted
  admitted, charge = limiter()
  buckets, reply[2] = admitted(limits, now)
  if not buckets then refused = 'LIMITED' end
end
if depth ~= '' and counting()() + #new > tonumber(depth) then refused = 'FULL' end
if refused then
  for _, task in ipairs(new) do reply[task[4]] = refused end
  return reply
end
local is_known_queue = call('HEXISTS', queues, command_of(queue)) == 1
-- decided; only writes below
if buckets then charge(buckets, #new, now) end
for _, task in ipairs(new) do
  local i, visible = task[1], task[2]
  local key, digest = task_key(ARGV[i]), ARGV[i + 5]
  if digest ~= '' then
    create(key, 'spec', ARGV[i + 1], 'queue', queue, 'priority', priority, 'max', ARGV[i + 2], 'status', 'PENDING',
      'created', now, 'visible', visible, 'idem', digest, 'fingerprint', ARGV[i + 6])
    string_set(idem_key(tid, digest), task[3], ARGV[i], 'PX', idem_ttl_ms)
  elseif visible > now then
    create(key, 'spec', ARGV[i + 1], 'queue', queue, 'priority', priority, 'max', ARGV[i + 2], 'status', 'PENDING',
      'created', now, 'visible', visible)
  else
    create(key, 'spec', ARGV[i + 1], 'queue', queue, 'priority', priority, 'max', ARGV[i + 2], 'status', 'PENDING',
      'created', now)
  end
end
if #new > 0 and not is_known_queue then
  hash_set(queues, { command_of(queue) }, {}, command_of(queue), 'active')
  call('SADD', tenants, tid) -- stays, even if what follows is taken back: the tenant is known by then
  -- Who waits for every queue of the tenant could not ask to be woken for this one: it was not there.
  call('PUBLISH', root .. 'wake', 'queue ' .. queue)
end
if first then
  zset_add(delayed, later)
  visit_by(queue, first)
end
if #at_once > 0 and push(ready, at_once) == #at_once then woke(queue, now) end
return reply
