"""Two tenants with live work, people with roles, and a drain that runs when told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.auth.models import User
from django.test import Client

from queues.models import AuditedResult
from queues.periodic_tasks import run_drain
from tenants.cache import tenant_cache
from tenants.models import Tenant, TenantMembership
from tests.console.rows import CANARY, Rows
from tests.fixtures.queues import Queue

Login = Callable[..., Client]


@pytest.fixture(autouse=True)
def _nobody_follows() -> Iterator[None]:
    """The directory's thread would hold the test database open."""
    yield
    tenant_cache.stop()


def make_queue(slug: str, command: str) -> Queue:
    """A queue of a tenant that has a row. Redis' own clock: the console compares it with ours."""
    row = Tenant.objects.create(slug=slug)
    tenant = tenant_cache.find_by_tid(row.tid)
    assert tenant is not None
    return Queue(tenant, command)


@pytest.fixture
def acme(db: None) -> Queue:
    return make_queue("acme", "render")


@pytest.fixture
def zeta(db: None) -> Queue:
    """Somebody else's: every word in it is one that must not show."""
    return make_queue("kanarie-zeta", "kanarie.send")


@pytest.fixture
def login(acme: Queue) -> Login:
    """`login("operator")`: a client of staff with this role for acme; `login(None)` without any; `login("root")`."""

    def as_role(role: str | None, *, enforce_csrf_checks: bool = False) -> Client:
        user = User.objects.create(username=f"staff-{role}", is_staff=True, is_superuser=role == "root")
        if role not in {None, "root"}:
            TenantMembership.objects.create(tenant_id=acme.tenant.tid, user=user, role=str(role))
        client = Client(enforce_csrf_checks=enforce_csrf_checks)
        client.force_login(user)
        return client

    return as_role


@pytest.fixture
def mine(acme: Queue) -> Rows:
    return Rows(acme, "mine")


@pytest.fixture
def foreign(zeta: Queue) -> Rows:
    return Rows(zeta, CANARY)


def drain() -> None:
    run_drain(lambda: True)


def die(queue: Queue, count: int = 1, payload: str = '{"n":1}', error: str = "no disk 7") -> list[str]:
    """Dead letters, and the audit knows of them."""
    from queues import services

    ids = []
    for _ in range(count):
        queue.enqueue(payload, max_attempts=1, priority=9)
        task = queue.claim("w-7")
        services.nack(queue.tenant, task.id, "w-7", reason=error).run_sync()
        ids.append(task.id)
    drain()
    assert AuditedResult.objects.filter(pk__in=ids, is_dead=True).count() == count
    return ids
