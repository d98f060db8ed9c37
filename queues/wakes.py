"""Queues that turned non-empty, for whoever tells workers of it. Advisory: what is lost here, a claim still finds."""

from __future__ import annotations

from typing import NamedTuple

from core.errors import CodeqError
from core.redis.connections import client, reachable_partitions
from queues.current_engine import engine
from queues.engine import keys, queries

CHUNK = 1000


class Queue(NamedTuple):
    tid: str
    command: str


class Depth(NamedTuple):
    """What waits in a queue. A paused one has nothing ready: whoever is told of it could claim nothing."""

    ready: int
    delayed: int


def take() -> list[Queue]:
    """The queues that turned non-empty since they were last taken, each given to one taker only."""
    names: list[bytes] = []
    with client().pipeline(transaction=False) as pipe:
        for partition in reachable_partitions():
            pipe.spop(keys.of_partition(partition).woken, CHUNK)
        for found in pipe.execute():
            names += found
    return [Queue(tid, command) for tid, _, command in (name.decode().partition(":") for name in names)]


def depth(queue: Queue) -> Depth:
    try:
        [stats] = queries.stats(engine(), queue.tid, [queue.command]).run_sync()
    except CodeqError:
        return Depth(0, 0)
    return Depth(0 if stats.is_paused else stats.ready, stats.delayed)


def trace(queue: Queue) -> tuple[str, str]:
    """The trace context of the task that is next in line; two empty words where there is none."""
    try:
        in_line = queries.peek(engine(), queue.tid, queue.command, 1).run_sync().in_line
        [task] = queries.tasks(engine(), queue.tid, [in_line[0].id]).run_sync() if in_line else [None]
    except CodeqError:
        return "", ""
    return (task.spec.trace_parent or "", task.spec.trace_state or "") if task else ("", "")
