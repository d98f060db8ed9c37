"""Reads of live data from Redis.

Each takes one round trip unless its docstring gives another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from core import errors
from core.redis.connections import reachable_partitions
from core.redis.script_call import ScriptCall, merge_calls
from queues import validation
from queues.current_engine import engine
from queues.domain import QueuePeek, QueuePosition, QueueStats, Result, StoredResult, Task, TaskStatus
from queues.engine import queries
from queues.filters import filters
from tenants.domain import TenantSnapshot

# Counting this many queues takes Redis about a millisecond.
QUEUES_AT_ONCE = 50


def task(tenant: TenantSnapshot, task_id: str) -> ScriptCall[Task]:
    """Return a task in Redis. Raises TaskNotFound if the tenant has no such task there."""
    return _read(tenant, task_id, watch=False).and_then(lambda reply: reply[0])


def result(tenant: TenantSnapshot, task_id: str, *, watch: bool = False) -> ScriptCall[tuple[Task, Result]]:
    """Return an ended task and its result. Raises ResultNotFound if there is no result.

    With `watch`, Redis sends `queues.long_poll` a message when the task ends, if it has not ended yet.
    """

    def with_result(reply: tuple[Task, StoredResult | None]) -> tuple[Task, Result]:
        task, stored = reply
        if stored is None or task.status not in (TaskStatus.COMPLETED, TaskStatus.FAILED):
            raise errors.ResultNotFound
        return task, Result(
            task_id=task.id,
            status=task.status,
            worker=task.worker or "",
            completed_ms=task.updated_ms,
            attempts=task.attempts,
            result=msgspec.Raw(stored.result) if stored.result is not None else None,
            error=stored.error,
            artifacts=msgspec.Raw(stored.artifacts) if stored.artifacts is not None else None,
        )

    return _read(tenant, task_id, watch=watch).and_then(with_result)


def queue_stats(tenant: TenantSnapshot, command: str) -> ScriptCall[QueueStats]:
    """Count the tasks of one queue."""
    validation.check_command(command)
    return queries.stats(engine(), tenant.tid, [command]).and_then(lambda queues: queues[0])


def queues(tenant: TenantSnapshot) -> ScriptCall[list[QueueStats]]:
    """Count the tasks of every queue of the tenant. The queues are sorted by name.

    It takes the round trips of `queues_of`.
    """
    return queues_of([tenant.tid]).and_then(lambda by_tenant: by_tenant[tenant.tid])


def list_queues(tenant: TenantSnapshot) -> ScriptCall[list[str]]:
    """Return the names of the tenant's queues, sorted.

    It takes a round trip for about every 1,000 queues.
    """
    return queries.list_queues(engine(), tenant.tid)


def queues_of(tids: Sequence[str]) -> ScriptCall[dict[str, list[QueueStats]]]:
    """Count the tasks of every queue of some tenants.

    The queues of a tenant are sorted by name. It takes the round trips of `list_queues` and one for about every 50
    queues, since a tenant may have any number of them: one script that counts 20,000 queues would block Redis for half
    a second.
    """

    def count(names: list[list[str]]) -> ScriptCall[dict[str, list[QueueStats]]]:
        chunks = (
            (tid, commands[at : at + QUEUES_AT_ONCE])
            for tid, commands in zip(tids, names, strict=True)
            for at in range(0, len(commands), QUEUES_AT_ONCE)
        )
        return _count(chunks, {tid: [] for tid in tids})

    return merge_calls(engine().runner, [queries.list_queues(engine(), tid) for tid in tids]).and_then(count)


def _count(
    chunks: Iterator[tuple[str, list[str]]], by_tenant: dict[str, list[QueueStats]]
) -> ScriptCall[dict[str, list[QueueStats]]]:
    """Count some chunks in one round trip, then the others."""
    counted, size = [], 0
    while size < QUEUES_AT_ONCE and (chunk := next(chunks, None)):
        counted.append(chunk)
        size += len(chunk[1])

    def add(replies: list[list[QueueStats]]) -> dict[str, list[QueueStats]] | ScriptCall[dict[str, list[QueueStats]]]:
        for (tid, _), queues in zip(counted, replies, strict=True):
            by_tenant[tid] += queues
        return _count(chunks, by_tenant) if counted else by_tenant

    calls = [queries.stats(engine(), tid, commands) for tid, commands in counted]
    return merge_calls(engine().runner, calls).and_then(add)


def peek(tenant: TenantSnapshot, command: str, limit: int = 25) -> ScriptCall[QueuePeek]:
    """Return the first ready, in-progress and delayed tasks of a queue, `limit` each at most."""
    validation.check_command(command)
    return queries.peek(engine(), tenant.tid, command, limit)


def task_with_result(tenant: TenantSnapshot, task_id: str) -> ScriptCall[tuple[Task, StoredResult | None]]:
    """Return a task in Redis and its result, or None if it has no result."""
    return _read(tenant, task_id, watch=False)


def find_tenant(task_id: str) -> ScriptCall[str | None]:
    """Return the tid of the tenant that owns the task, or None if no tenant has such a task.

    It reads across all tenants, so the caller must check permissions first.
    """
    validation.check_id(task_id)
    return queries.find_tenant(engine(), task_id, reachable_partitions())


def queue_position(tenant: TenantSnapshot, task_id: str) -> ScriptCall[QueuePosition]:
    """Return the position of a task in its queue."""
    validation.check_id(task_id)
    return queries.queue_position(engine(), tenant.tid, task_id)


def _read(tenant: TenantSnapshot, task_id: str, *, watch: bool) -> ScriptCall[tuple[Task, StoredResult | None]]:
    validation.check_id(task_id)
    return filters().unless_deleted(
        tenant.tid, task_id, lambda: queries.task(engine(), tenant.tid, task_id, watch=watch)
    )
