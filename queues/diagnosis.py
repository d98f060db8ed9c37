"""Explanations of a task's state.

The reasons why a task is not running are in the order in which a claim checks them.
"""

from __future__ import annotations

from datetime import UTC, datetime

from queues.domain import Location, QueuePosition, Task, TaskStatus
from tenants.domain import TenantSnapshot


def explain(tenant: TenantSnapshot, task: Task, position: QueuePosition) -> list[str]:
    """Return sentences that explain why the task waits, where it runs, or how it ended."""
    if task.status is TaskStatus.IN_PROGRESS:
        return [_explain_lease(task, position)]
    if task.status is not TaskStatus.PENDING:
        return [_explain_end(task)]
    reasons = []
    if position.command != task.spec.command:
        reasons.append(
            f"All its attempts in queue {task.spec.command} failed. The policy of that queue moved it to queue "
            f"{position.command}."
        )
    if tenant.is_suspended:
        reasons.append(f"Tenant {tenant.slug} is suspended: its workers get no tasks.")
    if position.is_paused:
        reasons.append(f"Queue {position.command} is paused: workers get no task from it until it is resumed.")
    if position.is_busy:
        reasons.append(
            f"The queue has as many tasks in progress as its policy allows ({position.in_progress:,}): workers get the "
            "next task when one of them ends."
        )
    if task.location is Location.DELAYED_ZSET:
        reasons.append(_explain_delay(task, position))
    else:
        reasons += _explain_order(task, position)
    return reasons


def _explain_lease(task: Task, position: QueuePosition) -> str:
    deadline = task.lease_until_ms or 0
    attempt = f"attempt {task.attempts + 1} of {task.max_attempts}"
    if deadline > position.now_ms:
        return (
            f"Running: {task.worker} works on it ({attempt}). "
            f"The lease expires in {_format_duration(deadline - position.now_ms)}, at {_format_time(deadline)}."
        )
    is_last = task.attempts + 1 >= task.max_attempts
    next_step = "the task becomes a dead letter" if is_last else "the task is retried"
    return (
        f"The lease of {task.worker} ({attempt}) expired at {_format_time(deadline)}. The attempt ends with "
        f"the next claim from the queue, or within a second, and {next_step}."
    )


def _explain_end(task: Task) -> str:
    if task.location is Location.DLQ_SET:
        return f"Dead letter: {task.attempts} of {task.max_attempts} attempts failed. Replay it to try again."
    explanations = {
        TaskStatus.COMPLETED: "Completed: its worker submitted a result.",
        TaskStatus.FAILED: "Failed: its worker submitted an error that is not retried.",
        TaskStatus.CANCELLED: "Cancelled.",
    }
    return explanations[task.status]


def _explain_delay(task: Task, position: QueuePosition) -> str:
    if task.visible_ms <= position.now_ms:
        return "Due: the next claim makes it ready, or beat does within a second."
    until = f"until {_format_time(task.visible_ms)}, for {_format_duration(task.visible_ms - position.now_ms)} more"
    if task.attempts:
        error = f" ({task.error})" if task.error else ""
        return f"{task.attempts} of {task.max_attempts} attempts failed{error}. It waits {until} before it is retried."
    return f"Scheduled: it waits {until}."


def _explain_order(task: Task, position: QueuePosition) -> list[str]:
    reasons = []
    if position.higher:
        reasons.append(f"{_count_tasks(position.higher)} of a higher priority than {task.priority} ahead of it.")
    if position.ahead is None:
        reasons.append(f"More than 10,000 tasks of priority {task.priority} are ahead of it.")
    elif position.ahead:
        reasons.append(f"{_count_tasks(position.ahead)} of the same priority ahead of it.")
    if not position.higher and position.ahead == 0:
        reasons.append(f"Next: the first worker that claims from queue {position.command} gets it.")
    if not position.is_awaited:
        reasons.append("No worker is waiting for this queue: the task runs when a worker claims it.")
    return reasons


def _count_tasks(count: int) -> str:
    return "1 task is" if count == 1 else f"{count:,} tasks are"


def _format_duration(ms: int) -> str:
    seconds = ms // 1000
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _format_time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
