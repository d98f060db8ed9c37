"""The periodic task of ranked queues."""

from __future__ import annotations

from core.periodic_lock import PeriodicTaskLock
from queues.periodic import periodic_task
from ranked import services


# The task keeps its name from the app `queues`, because during an upgrade processes of both releases exchange messages.
@periodic_task("queues.ranked", has_work=services.has_waiting_entries)
def sweep(lock: PeriodicTaskLock) -> str:
    """Enqueue the entries that Redis could not store when their transactions committed."""
    return f"{services.sweep(lock.renew)} enqueued"
