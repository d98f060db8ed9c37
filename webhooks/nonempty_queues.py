"""Queues that turned non-empty, recorded until a run of the notifications takes them.

The Lua scripts record them in a set. The record is advisory: if an entry is lost, a worker's next claim still finds the
tasks.
"""

from __future__ import annotations

from typing import NamedTuple

from core.errors import CodeqError
from core.redis.connections import client, reachable_partitions
from queues.current_engine import engine
from queues.engine import keys, queries

CHUNK = 1000  # queues taken from one partition at a time


class QueueRef(NamedTuple):
    """A queue of a tenant."""

    tid: str
    command: str


class WaitingTasks(NamedTuple):
    """Numbers of tasks in a queue that no worker has claimed."""

    ready: int
    delayed: int


def take() -> list[QueueRef]:
    """Remove and return the recorded queues, at most `CHUNK` of each partition.

    SPOP returns each queue to one caller only.
    """
    names: list[bytes] = []
    with client().pipeline(transaction=False) as pipe:
        for partition in reachable_partitions():
            pipe.spop(keys.of_partition(partition).woken, CHUNK)
        for partition_names in pipe.execute():
            names += partition_names
    return [QueueRef(tid, command) for tid, _, command in (name.decode().partition(":") for name in names)]


def count_waiting(queue: QueueRef) -> WaitingTasks:
    """Count the waiting tasks of a queue; zeros if Redis is unavailable.

    A paused queue counts no ready tasks, because a notified worker could not claim them.
    """
    try:
        [stats] = queries.stats(engine(), queue.tid, [queue.command]).run_sync()
    except CodeqError:
        return WaitingTasks(0, 0)
    return WaitingTasks(0 if stats.is_paused else stats.ready, stats.delayed)


def get_next_trace(queue: QueueRef) -> tuple[str, str]:
    """Return `traceparent` and `tracestate` of the next task, or empty strings."""
    try:
        next_tasks = queries.peek(engine(), queue.tid, queue.command, 1).run_sync().ready
        [task] = queries.tasks(engine(), queue.tid, [next_tasks[0].id]).run_sync() if next_tasks else [None]
    except CodeqError:
        return "", ""
    return (task.spec.trace_parent or "", task.spec.trace_state or "") if task else ("", "")
