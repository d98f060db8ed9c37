"""Checks whether a periodic task has work. They cost less than a run that finds nothing.

Celery beat calls them before it sends a periodic task (`codeq_site/beat.py`). A check may return True without work, but
never False with work.
"""

from __future__ import annotations

from core.conf import conf
from core.redis.connections import client, reachable_partitions
from queues.current_engine import engine
from queues.engine import keys
from queues.models import BulkJob


def has_events() -> bool:
    """Whether an events stream has entries. The drain removes those that are stored."""
    with client().pipeline(transaction=False) as pipe:
        for partition in reachable_partitions():
            pipe.xlen(keys.of_partition(partition).events)
        return any(pipe.execute())


def has_due_tasks() -> bool:
    """Whether a queue has due tasks or expired leases, by the clock of Redis."""
    if conf().redis_cluster:
        return True  # each primary has a clock of its own
    with client().pipeline(transaction=False) as pipe:
        pipe.time()
        for partition in reachable_partitions():
            pipe.zrange(keys.of_partition(partition).due, 0, 0, withscores=True)
        (seconds, micros), *first_queues = pipe.execute()
    clock = engine().clock
    now_ms = clock() if clock else seconds * 1000 + micros / 1000
    return any(due_ms <= now_ms for first in first_queues for _, due_ms in first)


def has_bulk_jobs() -> bool:
    """Whether a bulk job has not ended."""
    return BulkJob.objects.filter(ended_at=None).exists()
