--! read_task: read one task, with its answer if requested, and request an announcement of its end.
--! KEYS    due
--! ARGV    root tid id with_answer watch
--! RETURNS {task…} {answer | nil} | nothing
--! EFFECTS task.awaited set if watch is 1 and the task has not ended; otherwise none
--! COST    O(1)
--! FLAGS   allow-oom
--@ include keys, task
local _ = due -- routes the call to the tenant's slot
local fields = read_task(id)
if not fields then return {} end
local status, answer = fields[3], with_answer == '1' and call('HGET', task_key(id), 'answer')
if watch == '1' and (status == 'PENDING' or status == 'IN_PROGRESS') then call('HSET', task_key(id), 'awaited', 1) end
return { fields, answer }
