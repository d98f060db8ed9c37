"""Why a task is not running, in words: the conditions a claim meets, in the order in which it meets them."""

from __future__ import annotations

from datetime import UTC, datetime

from queues.domain import Location, QueuePosition, Status, Task
from tenants.domain import TenantSnapshot


def why(tenant: TenantSnapshot, task: Task, place: QueuePosition) -> list[str]:
    """What keeps the task from being worked on, the first thing first; or what it is doing instead."""
    if task.status is Status.IN_PROGRESS:
        return _held(task, place)
    if task.status is not Status.PENDING:
        return _ended(task)
    found = []
    if tenant.is_suspended:
        found.append(f"Tenant {tenant.slug} is suspended: none of its workers gets a task.")
    if place.is_paused:
        found.append(f"Queue {task.spec.command} is paused: workers get nothing from it until it is resumed.")
    if place.is_busy:
        found.append(
            f"As many tasks of the queue are in progress as its policy allows ({place.in_progress:,}): the next claim "
            "gets something when one of them ends."
        )
    if task.location is Location.DELAYED_ZSET:
        found.append(_delayed(task, place))
    else:
        found += _in_line(task, place)
    return found


def _held(task: Task, place: QueuePosition) -> list[str]:
    deadline = task.lease_until_ms or 0
    which = f"attempt {task.attempts + 1} of {task.max_attempts}"
    if deadline > place.now_ms:
        return [
            f"It is running: {task.worker} works on it ({which}) and must answer within "
            f"{_span(deadline - place.now_ms)}, by {_moment(deadline)}."
        ]
    after = "it dies" if task.attempts + 1 >= task.max_attempts else "it is tried again"
    return [
        f"{task.worker} had it ({which}) and has not answered since {_moment(deadline)}. The next look at the queue, "
        f"by a claim or by beat, takes the lease away, and {after}."
    ]


def _ended(task: Task) -> list[str]:
    if task.location is Location.DLQ_SET:
        return [
            f"It is dead: tried {_times(task.attempts)} without success, which is as often as it may be. "
            "Nothing claims it; replay it to try again."
        ]
    ended = {
        Status.COMPLETED: "It has run: its worker said that it is done.",
        Status.FAILED: "It has run: its worker said that it failed for good.",
        Status.CANCELLED: "It was cancelled.",
    }
    return [ended[task.status]]


def _delayed(task: Task, place: QueuePosition) -> str:
    if task.visible_ms <= place.now_ms:
        return "It is due. The next claim, or beat within a second, puts it in line."
    until = f"until {_moment(task.visible_ms)}, for {_span(task.visible_ms - place.now_ms)} more"
    if task.attempts:
        error = f" ({task.error})" if task.error else ""
        return f"It failed {_times(task.attempts)} of {task.max_attempts}{error} and waits {until} before the next try."
    return f"It is to run later: it waits {until}."


def _in_line(task: Task, place: QueuePosition) -> list[str]:
    found = []
    if place.higher:
        found.append(f"{_tasks(place.higher)} of a higher priority than {task.priority} in line before it.")
    if place.ahead is None:
        found.append(f"More than 10,000 tasks of priority {task.priority} are in line before it.")
    elif place.ahead:
        found.append(f"{_tasks(place.ahead)} of the same priority in line before it.")
    if not place.higher and place.ahead == 0:
        found.append("It is the next: whoever claims from this queue gets it.")
    if not place.is_awaited:
        found.append("No worker waits for this queue at the moment: it runs when one claims.")
    return found


def _tasks(count: int) -> str:
    return "1 task is" if count == 1 else f"{count:,} tasks are"


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def _span(ms: int) -> str:
    seconds = ms // 1000
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
