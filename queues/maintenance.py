"""Maintenance of queues: make due tasks ready, end expired leases, delete old tasks.

A claim does the first two for its own queues, so that queues work without beat. These functions do it for all queues.
Every step is one script and is safe to repeat.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

from core.errors import Unavailable
from core.redis.connections import client, reachable_partitions
from queues import artifacts, services
from queues.audit import stream
from queues.current_engine import engine
from queues.engine import keys, maintenance_commands
from queues.engine.options import PART
from tenants.cache import tenant_cache

log = logging.getLogger(__name__)

MayContinue = Callable[[], bool]
# Tasks of one tenant that stay because their artifacts cannot be deleted yet. Each pass reads all of them again.
MAX_POSTPONED = 5_000


def repair(may_continue: MayContinue) -> tuple[int, int]:
    """Repair every queue in which something is due.

    Returns the number of tasks that became ready and the number of expired leases.
    """
    promoted = expired = 0
    for partition in reachable_partitions():
        # The queue that has been due longest comes first. A queue with nothing left to do leaves the list.
        for tid, command in maintenance_commands.due_queues(engine(), partition).run_sync():
            moved = reaped = PART
            while (moved == PART or reaped == PART) and may_continue():
                moved = maintenance_commands.promote(engine(), tid, command, PART).run_sync()[0]
                reaped = maintenance_commands.reap(
                    engine(), tid, command, PART, dead_retention_ms=_dead_retention_ms(tid)
                ).run_sync()[0]
                promoted += moved
                expired += reaped
            if not may_continue():
                return promoted, expired
    return promoted, expired


def cleanup(may_continue: MayContinue) -> int:
    """Delete ended tasks whose retention has ended and that are stored in PostgreSQL.

    Returns the number of deleted tasks.
    """
    deleted = 0
    remover = artifacts.Remover()
    for partition in reachable_partitions():
        # Retention ends no earlier than the task does, so a task whose retention ended before this time is audited.
        before_ms = stream.drained_until_ms(partition) - 1
        for tid in client().sscan_iter(keys.of_partition(partition).tenants):
            for count in _delete_in_passes(tid.decode(), before_ms, sys.maxsize, remover):
                deleted += count
                if not may_continue():
                    return deleted
    return deleted


def cleanup_tenant(tid: str, *, before_ms: int, limit: int) -> int:
    """Delete at most `limit` tasks of one tenant whose retention ended before `before_ms`.

    Returns the number of deleted tasks. Tasks that PostgreSQL does not have yet are kept.
    """
    audited_ms = stream.drained_until_ms(engine().partition_of(tid)) - 1
    return sum(_delete_in_passes(tid, min(before_ms, audited_ms), limit, artifacts.Remover()))


def _delete_in_passes(tid: str, before_ms: int, limit: int, remover: artifacts.Remover) -> Iterator[int]:
    """Delete tasks whose retention has ended, in passes.

    Yields the number of tasks that each pass deleted.

    Artifacts are deleted before their task: a crash in between leaves a task that the next run deletes, and no orphaned
    file. If their storage is unavailable the task stays, and the tasks after it are deleted. Such tasks are few, since
    workers cannot submit artifacts meanwhile. If there are too many they are deleted without their artifacts, because
    the memory of Redis matters more than the files.
    """
    postponed: set[str] = set()

    def select(task_ids: list[str]) -> list[str]:
        new = [task_id for task_id in task_ids if task_id not in postponed]
        with_artifacts = remover.remove(tid, new)
        if len(postponed) + len(with_artifacts) > MAX_POSTPONED:
            log.error("tenant %s: %d tasks are deleted without their artifacts", tid, len(with_artifacts))
            return new
        postponed.update(with_artifacts)
        return [task_id for task_id in new if task_id not in with_artifacts]

    while limit > 0:
        postponed_before = len(postponed)
        deleted = services.cleanup(
            tid, before_ms=before_ms, limit=limit, postponed=postponed_before, select=select
        ).run_sync()
        limit -= deleted
        yield deleted
        if not deleted and len(postponed) == postponed_before:
            return


def _dead_retention_ms(tid: str) -> int | None:
    """Return the retention of the tenant's dead letters, or None for the default.

    The default also applies while PostgreSQL is unavailable.
    """
    try:
        tenant = tenant_cache.find_by_tid(tid)
    except Unavailable:
        return None
    return tenant.dead_retention_ms if tenant else None
