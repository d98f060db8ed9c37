"""The reads: nothing changed, one round trip each where what they read is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from codeq_site import errors
from codeq_site.redis import engine, partitions
from queues import rules
from queues.engine import Call
from queues.engine.call import together
from queues.filters import filters
from queues.task import Answer, Peeked, Place, QueueStats, Result, Status, Task
from tenants.tenant import Tenant

# Queues counted in one round trip, give or take: two milliseconds of Redis' time.
QUEUES_AT_ONCE = 100


def task(tenant: Tenant, task_id: str) -> Call[Task]:
    """A live task. TaskNotFound for one that is gone, never was, or is another tenant's."""
    return _read(tenant, task_id, watch=False).then(lambda found: found[0])


def result(tenant: Tenant, task_id: str, *, watch: bool = False) -> Call[tuple[Task, Result]]:
    """An ended task with its answer. `watch`: if it has not ended, have its end announced (`queues.waiting`)."""

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

    return _read(tenant, task_id, watch=watch).then(answered)


def queue_stats(tenant: Tenant, command: str) -> Call[QueueStats]:
    rules.check_command(command)
    return engine().stats(tenant.tid, [command]).then(lambda queues: queues[0])


def queues(tenant: Tenant) -> Call[list[QueueStats]]:
    """Every queue the tenant has, by name."""
    return queues_of([tenant.tid]).then(lambda found: found[tenant.tid])


def names(tenant: Tenant) -> Call[list[str]]:
    """The names alone of the tenant's queues."""
    return engine().names(tenant.tid)


def queues_of(tids: Sequence[str]) -> Call[dict[str, list[QueueStats]]]:
    """The queues of many tenants, each one's by name.

    A tenant may have any number: counted by one script, 20,000 would keep Redis from everybody for half a second.
    """

    def counted(names: list[list[str]]) -> Call[dict[str, list[QueueStats]]]:
        pieces = (
            (tid, commands[at : at + QUEUES_AT_ONCE])
            for tid, commands in zip(tids, names, strict=True)
            for at in range(0, len(commands), QUEUES_AT_ONCE)
        )
        return _count(pieces, {tid: [] for tid in tids})

    return together(engine().runner, [engine().names(tid) for tid in tids]).follow(counted)


def _count(
    pieces: Iterator[tuple[str, list[str]]], found: dict[str, list[QueueStats]]
) -> Call[dict[str, list[QueueStats]]]:
    """Count some pieces in one round trip, and then the others."""
    asked, size = [], 0
    while size < QUEUES_AT_ONCE and (piece := next(pieces, None)):
        asked.append(piece)
        size += len(piece[1])

    def add(answers: list[list[QueueStats]]) -> dict[str, list[QueueStats]] | Call[dict[str, list[QueueStats]]]:
        for (tid, _), queues in zip(asked, answers, strict=True):
            found[tid] += queues
        return _count(pieces, found) if asked else found

    return together(engine().runner, [engine().stats(tid, commands) for tid, commands in asked]).follow(add)


def peek(tenant: Tenant, command: str, limit: int = 25) -> Call[Peeked]:
    """A look at a queue: at most `limit` tasks that are next, in progress, and delayed."""
    rules.check_command(command)
    return engine().peek(tenant.tid, command, limit)


def answered(tenant: Tenant, task_id: str) -> Call[tuple[Task, Answer | None]]:
    """A live task with what its worker said of it, if it has."""
    return _read(tenant, task_id, watch=False)


def owner(task_id: str) -> Call[str | None]:
    """The tid of the tenant whose live task this is, if it is any. Of all tenants: the asker's rights are to be seen
    to."""
    rules.check_id(task_id)
    return engine().owner(task_id, partitions())


def place(tenant: Tenant, task_id: str) -> Call[Place]:
    """Where a live task stands in its queue."""
    rules.check_id(task_id)
    return engine().place(tenant.tid, task_id)


def _read(tenant: Tenant, task_id: str, *, watch: bool) -> Call[tuple[Task, Answer | None]]:
    rules.check_id(task_id)
    return filters().gone_is_gone(tenant.tid, task_id, lambda: engine().task(tenant.tid, task_id, watch=watch))
