"""What queues need when nobody claims: due tasks made ready, expired leases given back, old tasks removed.

Claims do the first two for the queues they look at, so a system whose beat is dead still works; here they
are done for all. Every step is one script that may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable

from codeq_site.errors import Unavailable
from codeq_site.redis import client, engine
from queues import services, stream
from queues.engine import keys
from tenants.directory import directory

MayGoOn = Callable[[], bool]
LIMIT = 500  # tasks in one script: Redis answers nobody else meanwhile


def repair(may_go_on: MayGoOn) -> tuple[int, int]:
    """Visit every queue in which something is due: how many tasks became ready, how many leases were over."""
    promoted = expired = 0
    for partition in stream.partitions():
        # Longest due first; a visit that leaves nothing due takes the queue off the list.
        for tid, command in engine().visits(partition).now():
            moved = reaped = LIMIT
            while (moved == LIMIT or reaped == LIMIT) and may_go_on():
                moved = engine().promote(tid, command, LIMIT).now()[0]
                reaped = engine().reap(tid, command, LIMIT, dead_retention_ms=_dead_retention_ms(tid)).now()[0]
                promoted += moved
                expired += reaped
            if not may_go_on():
                return promoted, expired
    return promoted, expired


def cleanup(may_go_on: MayGoOn) -> int:
    """Remove ended tasks whose retention is over and that are in PostgreSQL; how many went."""
    removed = 0
    for partition in stream.partitions():
        of = keys.of_partition(partition)
        # Retention ends no earlier than the task did: what it had left before this moment is audited.
        before_ms = stream.drained_until_ms(partition) - 1
        for tid in client().sscan_iter(of.tenants):
            while may_go_on():
                went = services.cleanup(tid.decode(), before_ms=before_ms).now()
                removed += went
                if not went:
                    break
    return removed


def cleanup_tenant(tid: str, *, before_ms: int, limit: int) -> int:
    """The same for one tenant, at most `limit`, of what was over before a moment: what its administrator asks for."""
    audited_ms = stream.drained_until_ms(engine().partition_of(tid)) - 1
    removed = 0
    while removed < limit:
        went = services.cleanup(tid, before_ms=min(before_ms, audited_ms), limit=limit - removed).now()
        removed += went
        if not went:
            break
    return removed


def _dead_retention_ms(tid: str) -> int | None:
    """How long the tenant's dead letters stay; None (the default) where PostgreSQL cannot tell now."""
    try:
        tenant = directory.find_tid(tid)
    except Unavailable:
        return None
    return tenant.dead_retention_ms if tenant else None
