"""Steps that create queues and dead letters for the console's tests."""

from __future__ import annotations

from collections.abc import Callable

from django.test import Client

from queues import services
from queues.models import AuditedResult
from queues.periodic_tasks import run_drain
from tenants.cache import tenant_cache
from tests.factories import TenantFactory
from tests.fixtures.queues import Queue

Login = Callable[..., Client]


def create_queue(slug: str, command: str) -> Queue:
    """Create a tenant and return its queue.

    The queue uses Redis' own clock, because the console compares times with the system clock.
    """
    row = TenantFactory(slug=slug)
    tenant = tenant_cache.find_by_tid(row.tid)
    assert tenant is not None
    return Queue(tenant, command)


def drain_events() -> None:
    """Write the events stream to the audit."""
    run_drain(lambda: True)


def create_dead_letters(queue: Queue, count: int = 1, payload: str = '{"n":1}', error: str = "no disk 7") -> list[str]:
    """Create dead letters, write them to the audit, and return their ids."""
    ids = []
    for _ in range(count):
        queue.enqueue(payload, max_attempts=1, priority=9)
        task = queue.claim("w-7")
        services.nack(queue.tenant, task.id, "w-7", reason=error).run_sync()
        ids.append(task.id)
    drain_events()
    assert AuditedResult.objects.filter(pk__in=ids, is_dead=True).count() == count
    return ids
