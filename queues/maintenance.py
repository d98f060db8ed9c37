"""What queues need when nobody claims: due tasks made ready, expired leases given back, old tasks removed.

Claims do the first two for the queues they look at, so a system whose beat is dead still works; here they
are done for all. Every step is one script that may be repeated.
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
from tenants.cache import tenant_cache

log = logging.getLogger(__name__)

MayContinue = Callable[[], bool]
LIMIT = 250  # tasks in one script: Redis answers nobody else meanwhile
HELD_AT_MOST = 5_000  # of one tenant; they are read again with every pass


def repair(may_go_on: MayContinue) -> tuple[int, int]:
    """Visit every queue in which something is due: how many tasks became ready, how many leases were over."""
    promoted = expired = 0
    for partition in reachable_partitions():
        # Longest due first; a visit that leaves nothing due takes the queue off the list.
        for tid, command in maintenance_commands.due_queues(engine(), partition).run_sync():
            moved = reaped = LIMIT
            while (moved == LIMIT or reaped == LIMIT) and may_go_on():
                moved = maintenance_commands.promote(engine(), tid, command, LIMIT).run_sync()[0]
                reaped = maintenance_commands.reap(
                    engine(), tid, command, LIMIT, dead_retention_ms=_dead_retention_ms(tid)
                ).run_sync()[0]
                promoted += moved
                expired += reaped
            if not may_go_on():
                return promoted, expired
    return promoted, expired


def cleanup(may_go_on: MayContinue) -> int:
    """Remove ended tasks whose retention is over and that are in PostgreSQL; how many went."""
    removed = 0
    remover = artifacts.Remover()
    for partition in reachable_partitions():
        of = keys.of_partition(partition)
        # Retention ends no earlier than the task did: what it had left before this moment is audited.
        before_ms = stream.drained_until_ms(partition) - 1
        for tid in client().sscan_iter(of.tenants):
            for went in _passes(tid.decode(), before_ms, sys.maxsize, remover):
                removed += went
                if not may_go_on():
                    return removed
    return removed


def cleanup_tenant(tid: str, *, before_ms: int, limit: int) -> int:
    """The same for one tenant, at most `limit`, of what was over before a moment: what its administrator asks for."""
    audited_ms = stream.drained_until_ms(engine().partition_of(tid)) - 1
    removed = 0
    for went in _passes(tid, min(before_ms, audited_ms), limit, artifacts.Remover()):
        removed += went
    return removed


def _passes(tid: str, before_ms: int, limit: int, remover: artifacts.Remover) -> Iterator[int]:
    """Pass after pass over what is over, until there is nothing left that may go.

    Artifacts go before their task: a crash between the two leaves a task that the next run removes, never a file that
    nobody knows of. Where their storage is away the task stays, and those behind it go. No artifact can be handed in
    meanwhile, so they are few; should they be many, the memory of Redis is worth more than the files.
    """
    held: set[str] = set()

    def may_go(task_ids: list[str]) -> list[str]:
        new = [task_id for task_id in task_ids if task_id not in held]
        stay = remover.remove(tid, new)
        if len(held) + len(stay) > HELD_AT_MOST:
            log.error("tenant %s: %d tasks are removed, and their artifacts are not", tid, len(stay))
            return new
        held.update(stay)
        return [task_id for task_id in new if task_id not in stay]

    while limit > 0:
        before = len(held)
        went = services.cleanup(tid, before_ms=before_ms, limit=limit, held=before, may_go=may_go).run_sync()
        limit -= went
        yield went
        if not went and len(held) == before:
            return


def _dead_retention_ms(tid: str) -> int | None:
    """How long the tenant's dead letters stay; None (the default) where PostgreSQL cannot tell now."""
    try:
        tenant = tenant_cache.find_by_tid(tid)
    except Unavailable:
        return None
    return tenant.dead_retention_ms if tenant else None
