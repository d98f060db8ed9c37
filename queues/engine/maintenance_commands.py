"""Commands of periodic tasks: promote, reap, and delete ended tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core import errors
from core.redis.script_call import ScriptCall, send_in_parts
from queues.engine import keys
from queues.engine.arguments import random_seed
from queues.engine.engine import Engine
from queues.engine.options import CHUNK, PART

R = TypeVar("R")


def promote(engine: Engine, tid: str, command: str, limit: int = PART) -> ScriptCall[tuple[int, int]]:
    """Make the due tasks of a queue ready. Return their number, and when the next task is due.

    A task is due when its delay or its lease ends. The time is 0 if the queue has neither delayed nor leased tasks.
    """
    partition = engine.partition_keys(tid)
    return engine.prepare(
        "promote",
        lambda reply: (int(reply[0]), int(reply[1])),
        due=partition.due,
        waiting=partition.waiting,
        woken=partition.woken,
        root=partition.root,
        queue=keys.of_queue(partition.root, tid, command).name,
        limit=limit,
        clock=engine.clock_argument(),
    )


def reap(
    engine: Engine, tid: str, command: str, limit: int = PART, *, dead_retention_ms: int | None = None
) -> ScriptCall[tuple[int, int, int]]:
    """End the attempts in a queue that have an expired lease.

    Return the number of ended attempts, how many of their tasks are dead now, and when the next task is due, as
    `promote` does.
    """
    partition = engine.partition_keys(tid)
    return engine.prepare(
        "reap",
        lambda reply: (int(reply[0]), int(reply[1]), int(reply[2])),
        due=partition.due,
        waiting=partition.waiting,
        woken=partition.woken,
        events=partition.events,
        expiry=engine.tenant_keys(tid).expiry,
        root=partition.root,
        queue=keys.of_queue(partition.root, tid, command).name,
        limit=limit,
        seed=random_seed(),
        default_backoff=engine.options.default_backoff,
        dead_retention_ms=dead_retention_ms or engine.options.dead_retention_ms,
        clock=engine.clock_argument(),
    )


def due_queues(engine: Engine, partition: int, limit: int = CHUNK) -> ScriptCall[list[tuple[str, str]]]:
    """Return the queues in a partition that may have due tasks or expired leases.

    A queue is a pair of the tenant's tid and the command.
    """

    def decode(reply: list[bytes]) -> list[tuple[str, str]]:
        return [(tid, command) for tid, _, command in (name.decode().partition(":") for name in reply)]

    return engine.prepare(
        "due_queues", decode, due=keys.of_partition(partition).due, limit=limit, clock=engine.clock_argument()
    )


def expired(
    engine: Engine, tid: str, *, before_ms: int | None = None, limit: int = CHUNK
) -> ScriptCall[tuple[int, list[str]]]:
    """Return the time of Redis, and the ids of ended tasks whose retention has expired.

    The oldest expiry comes first. With `before_ms`, return only tasks whose retention expired by that time.
    """
    return engine.prepare(
        "expired",
        lambda reply: (int(reply[0]), [task_id.decode() for task_id in reply[1:]]),
        expiry=engine.tenant_keys(tid).expiry,
        before_ms="" if before_ms is None else before_ms,
        limit=limit,
        clock=engine.clock_argument(),
    )


def purge(engine: Engine, tid: str, task_ids: Sequence[str], *, before_ms: int | None = None) -> ScriptCall[list[bool]]:
    """Delete ended tasks with their results. Return whether each task was deleted.

    With `before_ms`, delete only those whose retention expired by that time; without it, regardless of the retention.
    """
    return _purge(engine, tid, task_ids, lambda reply: [outcome == 1 for outcome in reply], before_ms=before_ms)


def purge_dead(engine: Engine, tid: str, task_ids: Sequence[str]) -> ScriptCall[list[errors.CodeqError | None]]:
    """Delete dead letters, and no other tasks. Return the error of each task, or None."""
    refusals: dict[int, type[errors.CodeqError]] = {0: errors.NotDead, -1: errors.TaskNotFound}
    return _purge(
        engine,
        tid,
        task_ids,
        lambda reply: [refusals[outcome]() if outcome in refusals else None for outcome in reply],
        only_dead=1,
    )


def _purge(
    engine: Engine,
    tid: str,
    task_ids: Sequence[str],
    decode: Callable[[Any], list[R]],
    *,
    before_ms: int | None = None,
    only_dead: int = 0,
) -> ScriptCall[list[R]]:
    partition = engine.partition_keys(tid)

    def prepare(part: Sequence[str]) -> ScriptCall[list[R]]:
        return engine.prepare(
            "purge",
            decode,
            events=partition.events,
            expiry=engine.tenant_keys(tid).expiry,
            root=partition.root,
            tid=tid,
            before_ms="" if before_ms is None else before_ms,
            only_dead=only_dead,
            clock=engine.clock_argument(),
            args=part,
        )

    return send_in_parts(task_ids, PART, prepare)
