"""Repair and cleanup by periodic tasks, on queues without claims."""

from __future__ import annotations

import pytest

from core.redis.connections import client
from queues import maintenance, periodic_tasks, services
from queues.current_engine import engine
from queues.domain import Location, NewResult, NewTask, TaskStatus
from queues.engine import keys, queries
from queues.models import AuditedResult
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tests.factories import TenantFactory
from tests.fixtures.queues import Clock

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("stop_tenant_cache")]


@pytest.fixture
def tenant_row(tenant: TenantSnapshot) -> Tenant:
    return TenantFactory(tid=tenant.tid, slug=tenant.slug, dead_retention_seconds=120)


@pytest.fixture
def tenant_without_retention(tenant: TenantSnapshot) -> TenantSnapshot:
    """A tenant whose tasks can be removed as soon as they have ended."""
    return TenantSnapshot(tid=tenant.tid, slug=tenant.slug, retention_ms=0)


@pytest.mark.spec("BEA-1", "Due tasks become ready and expired leases are returned without a claim")
def test_repair_visits_every_queue_with_something_due_in_one_run(tenant: TenantSnapshot, clock: Clock) -> None:
    delayed = [NewTask(command=f"c{number}", payload="1", delay_ms=1000) for number in range(3)]
    services.enqueue(tenant, [*delayed, NewTask(command="held", payload="1", max_attempts=1)]).run_sync()
    services.claim(tenant, ["held"], "w", lease_seconds=1).run_sync()
    assert maintenance.repair(lambda: True) == (0, 0)
    clock.advance(2)
    assert periodic_tasks.repair() == "3 ready, 1 leases expired"
    assert periodic_tasks.repair() == "0 ready, 0 leases expired"


@pytest.mark.usefixtures("tenant_row")
def test_an_expired_lease_uses_the_dead_retention_of_its_tenant(tenant: TenantSnapshot, clock: Clock) -> None:
    services.enqueue(tenant, [NewTask(command="held", payload="1", max_attempts=1)]).run_sync()
    services.claim(tenant, ["held"], "w", lease_seconds=1).run_sync()
    clock.advance(2)
    maintenance.repair(lambda: True)
    root = keys.of_partition(engine().partition_of(tenant.tid)).root
    [(_, expires)] = client().zrange(keys.of_tenant(root, tenant.tid).expiry, 0, -1, withscores=True)
    assert expires == clock.now_ms + 120_000


@pytest.mark.spec("CLN-3", "Nothing is removed from Redis before it is in PostgreSQL")
def test_cleanup_removes_no_task_that_the_audit_does_not_have(tenant_without_retention: TenantSnapshot) -> None:
    [item] = services.enqueue(tenant_without_retention, [NewTask(command="c", payload="1")]).run_sync()
    services.claim(tenant_without_retention, ["c"], "w").run_sync()
    services.submit(
        tenant_without_retention, "w", [NewResult(task_id=item.task.id, status=TaskStatus.COMPLETED, result=b"{}")]
    ).run_sync()
    assert periodic_tasks.cleanup() == "0 removed"
    periodic_tasks.drain()
    assert periodic_tasks.cleanup() == "1 removed"
    assert AuditedResult.objects.filter(pk=item.task.id).exists()


@pytest.mark.spec("CLN-2", "Live work is never removed")
def test_cleanup_does_not_remove_live_tasks(tenant_without_retention: TenantSnapshot) -> None:
    [waiting, _] = services.enqueue(tenant_without_retention, [NewTask(command="c", payload="1")] * 2).run_sync()
    services.claim(tenant_without_retention, ["c"], "w").run_sync()
    assert periodic_tasks.cleanup() == "0 removed"
    assert (
        queries.task(engine(), tenant_without_retention.tid, waiting.task.id).run_sync()[0].location
        is Location.INPROG_SET
    )
