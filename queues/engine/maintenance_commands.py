"""What beat does to the queues: what is due moves, what is over goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core import errors
from core.redis.script_call import ScriptCall
from queues.engine import keys
from queues.engine.base import Engine, seed
from queues.engine.options import CHUNK

R = TypeVar("R")


def promote(engine: Engine, tid: str, command: str, limit: int = 250) -> ScriptCall[tuple[int, int]]:
    """Make due tasks ready: how many moved, and when the queue next has something due (0 = nothing)."""
    root, partition = engine.root(tid), engine.partition_keys(tid)
    return engine.call(
        "promote",
        lambda reply: (int(reply[0]), int(reply[1])),
        due=partition.due,
        waiting=partition.waiting,
        woken=partition.woken,
        root=root,
        queue=keys.of_queue(root, tid, command).name,
        limit=limit,
        clock=engine.now(),
    )


def reap(
    engine: Engine, tid: str, command: str, limit: int = 250, *, dead_retention_ms: int | None = None
) -> ScriptCall[tuple[int, int, int]]:
    """Give back tasks whose lease is over: expired, of those dead, and when the queue next has something due."""
    root, partition = engine.root(tid), engine.partition_keys(tid)
    return engine.call(
        "reap",
        lambda reply: (int(reply[0]), int(reply[1]), int(reply[2])),
        due=partition.due,
        waiting=partition.waiting,
        woken=partition.woken,
        events=partition.events,
        expiry=keys.of_tenant(root, tid).expiry,
        root=root,
        queue=keys.of_queue(root, tid, command).name,
        limit=limit,
        seed=seed(),
        default_backoff=engine.options.backoff_line,
        dead_retention_ms=dead_retention_ms or engine.options.dead_retention_ms,
        clock=engine.now(),
    )


def due_queues(engine: Engine, partition: int, limit: int = CHUNK) -> ScriptCall[list[tuple[str, str]]]:
    """The queues of a partition in which something is due now: tid and command."""

    def read(reply: list[bytes]) -> list[tuple[str, str]]:
        return [(tid, command) for tid, _, command in (name.decode().partition(":") for name in reply)]

    return engine.call("due_queues", read, due=keys.of_partition(partition).due, limit=limit, clock=engine.now())


def expired(
    engine: Engine, tid: str, *, before_ms: int | None = None, limit: int = CHUNK
) -> ScriptCall[tuple[int, list[str]]]:
    """Redis' now, and the ended tasks whose retention is over."""
    return engine.call(
        "expired",
        lambda reply: (int(reply[0]), [task_id.decode() for task_id in reply[1:]]),
        expiry=engine.tenant_keys(tid).expiry,
        before_ms="" if before_ms is None else before_ms,
        limit=limit,
        clock=engine.now(),
    )


def purge(engine: Engine, tid: str, task_ids: Sequence[str], *, before_ms: int | None = None) -> ScriptCall[list[bool]]:
    """Remove ended tasks; with `before_ms`, only those whose retention was over by then. Which ones went."""
    return _purge(engine, tid, task_ids, before_ms, lambda reply: [flag == 1 for flag in reply])


def purge_dead(engine: Engine, tid: str, task_ids: Sequence[str]) -> ScriptCall[list[errors.CodeqError | None]]:
    """Remove dead letters and nothing else; what was wrong with each, or None."""
    words: dict[int, type[errors.CodeqError]] = {0: errors.NotDead, -1: errors.TaskNotFound}
    return _purge(
        engine,
        tid,
        task_ids,
        None,
        lambda reply: [words[flag]() if flag in words else None for flag in reply],
        only_dead=1,
    )


def _purge(
    engine: Engine,
    tid: str,
    task_ids: Sequence[str],
    before_ms: int | None,
    read: Callable[[Any], list[R]],
    *,
    only_dead: int = 0,
) -> ScriptCall[list[R]]:
    return engine.call(
        "purge",
        read,
        events=engine.partition_keys(tid).events,
        expiry=engine.tenant_keys(tid).expiry,
        root=engine.root(tid),
        tid=tid,
        before_ms="" if before_ms is None else before_ms,
        only_dead=only_dead,
        clock=engine.now(),
        args=task_ids,
    )
