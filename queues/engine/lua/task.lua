--! task: read one task, and its answer when asked; a wait leaves word that it wants to be told of the end.
--! KEYS    due
--! ARGV    root tid id with_answer watch
--! RETURNS {task…} {answer | nil} | nothing
--! EFFECTS none, but task.awaited when watch is 1 and the task has not ended
--! COST    O(1)
--! FLAGS   allow-oom
--@ include keys, task
local _ = due -- routes the call to the tenant's slot
local fields = shown(id)
if not fields then return {} end
local status, answer = fields[3], with_answer == '1' and call('HGET', task_key(id), 'answer')
if watch == '1' and (status == 'PENDING' or status == 'IN_PROGRESS') then call('HSET', task_key(id), 'awaited', 1) end
return { fields, answer }
