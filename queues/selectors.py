"""The reads: nothing changed, one round trip each where what they read is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from core import errors
from core.redis.connections import reachable_partitions
from core.redis.script_call import ScriptCall, merge_calls
from queues import validation
from queues.current_engine import engine
from queues.domain import Answer, QueuePeek, QueuePosition, QueueStats, Result, Status, Task
from queues.engine import queries
from queues.filters import filters
from tenants.domain import TenantSnapshot

# Queues counted in one round trip, give or take: two milliseconds of Redis' time.
QUEUES_AT_ONCE = 100


def task(tenant: TenantSnapshot, task_id: str) -> ScriptCall[Task]:
    """A live task. TaskNotFound for one that is gone, never was, or is another tenant's."""
    return _read(tenant, task_id, watch=False).and_then(lambda found: found[0])


def result(tenant: TenantSnapshot, task_id: str, *, watch: bool = False) -> ScriptCall[tuple[Task, Result]]:
    """An ended task with its answer. `watch`: if it has not ended, have its end announced (`queues.long_poll`)."""

    def answered(found: tuple[Task, Answer | None]) -> tuple[Task, Result]:
        task, answer = found
        if answer is None or task.status not in (Status.COMPLETED, Status.FAILED):
            raise errors.ResultNotFound
        return task, Result(
            task_id=task.id,
            status=task.status,
            worker=task.worker or "",
            completed_ms=task.updated_ms,
            attempts=task.attempts,
            result=msgspec.Raw(answer.result) if answer.result is not None else None,
            error=answer.error,
            artifacts=msgspec.Raw(answer.artifacts) if answer.artifacts is not None else None,
        )

    return _read(tenant, task_id, watch=watch).and_then(answered)


def queue_stats(tenant: TenantSnapshot, command: str) -> ScriptCall[QueueStats]:
    validation.check_command(command)
    return queries.stats(engine(), tenant.tid, [command]).and_then(lambda queues: queues[0])


def queues(tenant: TenantSnapshot) -> ScriptCall[list[QueueStats]]:
    """Every queue the tenant has, by name."""
    return queues_of([tenant.tid]).and_then(lambda found: found[tenant.tid])


def names(tenant: TenantSnapshot) -> ScriptCall[list[str]]:
    """The names alone of the tenant's queues."""
    return queries.list_queues(engine(), tenant.tid)


def queues_of(tids: Sequence[str]) -> ScriptCall[dict[str, list[QueueStats]]]:
    """The queues of many tenants, each one's by name.

    A tenant may have any number: counted by one script, 20,000 would keep Redis from everybody for half a second.
    """

    def counted(names: list[list[str]]) -> ScriptCall[dict[str, list[QueueStats]]]:
        pieces = (
            (tid, commands[at : at + QUEUES_AT_ONCE])
            for tid, commands in zip(tids, names, strict=True)
            for at in range(0, len(commands), QUEUES_AT_ONCE)
        )
        return _count(pieces, {tid: [] for tid in tids})

    return merge_calls(engine().runner, [queries.list_queues(engine(), tid) for tid in tids]).and_then(counted)


def _count(
    pieces: Iterator[tuple[str, list[str]]], found: dict[str, list[QueueStats]]
) -> ScriptCall[dict[str, list[QueueStats]]]:
    """Count some pieces in one round trip, and then the others."""
    asked, size = [], 0
    while size < QUEUES_AT_ONCE and (piece := next(pieces, None)):
        asked.append(piece)
        size += len(piece[1])

    def add(answers: list[list[QueueStats]]) -> dict[str, list[QueueStats]] | ScriptCall[dict[str, list[QueueStats]]]:
        for (tid, _), queues in zip(asked, answers, strict=True):
            found[tid] += queues
        return _count(pieces, found) if asked else found

    return merge_calls(engine().runner, [queries.stats(engine(), tid, commands) for tid, commands in asked]).and_then(
        add
    )


def peek(tenant: TenantSnapshot, command: str, limit: int = 25) -> ScriptCall[QueuePeek]:
    """A look at a queue: at most `limit` tasks that are next, in progress, and delayed."""
    validation.check_command(command)
    return queries.peek(engine(), tenant.tid, command, limit)


def answered(tenant: TenantSnapshot, task_id: str) -> ScriptCall[tuple[Task, Answer | None]]:
    """A live task with what its worker said of it, if it has."""
    return _read(tenant, task_id, watch=False)


def owner(task_id: str) -> ScriptCall[str | None]:
    """The tid of the tenant whose live task this is, if it is any. Of all tenants: the asker's rights are to be seen
    to."""
    validation.check_id(task_id)
    return queries.find_tenant(engine(), task_id, reachable_partitions())


def place(tenant: TenantSnapshot, task_id: str) -> ScriptCall[QueuePosition]:
    """Where a live task stands in its queue."""
    validation.check_id(task_id)
    return queries.queue_position(engine(), tenant.tid, task_id)


def _read(tenant: TenantSnapshot, task_id: str, *, watch: bool) -> ScriptCall[tuple[Task, Answer | None]]:
    validation.check_id(task_id)
    return filters().unless_deleted(
        tenant.tid, task_id, lambda: queries.task(engine(), tenant.tid, task_id, watch=watch)
    )
