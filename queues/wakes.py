"""Queues that turned non-empty, for whoever tells workers of it. Advisory: what is lost here, a claim still finds."""

from __future__ import annotations

from typing import NamedTuple

from codeq_site.errors import CodeqError
from codeq_site.redis import client, engine, partitions
from queues.engine import keys

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
        for partition in partitions():
            pipe.spop(keys.of_partition(partition).woken, CHUNK)
        for found in pipe.execute():
            names += found
    return [Queue(tid, command) for tid, _, command in (name.decode().partition(":") for name in names)]


def depth(queue: Queue) -> Depth:
    try:
        [stats] = engine().stats(queue.tid, [queue.command]).now()
    except CodeqError:
        return Depth(0, 0)
    return Depth(0 if stats.is_paused else stats.ready, stats.delayed)


def trace(queue: Queue) -> tuple[str, str]:
    """The trace context of the task that is next in line; two empty words where there is none."""
    try:
        in_line = engine().peek(queue.tid, queue.command, 1).now().in_line
        [task] = engine().tasks(queue.tid, [in_line[0].id]).now() if in_line else [None]
    except CodeqError:
        return "", ""
    return (task.spec.trace_parent or "", task.spec.trace_state or "") if task else ("", "")
