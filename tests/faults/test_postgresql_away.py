"""PostgreSQL frozen, or stopped and started, under load: the API does not notice, and the audit misses nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection

from codeq_site.embedded import PostgreSQL
from queues import stream
from queues.models import Attempt, AuditedResult, Quarantine
from tenants import keys, services
from tenants.tenant import Role
from tests.faults.deployment import Deployment, database_at, freeze, thaw
from tests.faults.load import Load, percentile_ms
from tests.queues.engine.world import LONG
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
AWAY_SECONDS = 60 if LONG else 10
TENANT = "north"


@contextmanager
def frozen(server: PostgreSQL) -> Iterator[None]:
    stopped = freeze(server.pid)
    try:
        yield
    finally:
        thaw(stopped)


@contextmanager
def stopped(server: PostgreSQL) -> Iterator[None]:
    connection.close()  # the test's own
    server.stop()
    yield
    server.start()


def tokens(role: Role, count: int) -> list[str]:
    return [services.issue_token(TENANT, role, subject=f"{role}-1") for _ in range(count)]


@pytest.fixture
def server(postgres_server: Callable[..., PostgreSQL]) -> Iterator[PostgreSQL]:
    server = postgres_server(fsync="off")
    keys.own_keys.forget()
    with database_at(server.url):
        call_command("migrate", verbosity=0, skip_checks=True)
        yield server
    keys.own_keys.forget()


@pytest.fixture
def deployment(server: PostgreSQL, tmp_path: Path) -> Iterator[Deployment]:
    # The set of keys is read again while PostgreSQL is away, and every token verified again after a second.
    deployment = Deployment(tmp_path, server.url, CODEQ_AUTH_CACHE_SECONDS="1")
    yield deployment
    deployment.close()


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("BEA-1", "PostgreSQL away under load: no request fails or waits, 0 rows missing, 0 doubled (B-17)")
@pytest.mark.parametrize("away", [frozen, stopped], ids=["frozen", "stopped"])
def test_the_api_does_not_notice_that_postgresql_is_away(
    server: PostgreSQL,
    deployment: Deployment,
    away: Callable[[PostgreSQL], object],
) -> None:
    services.create_tenant(TENANT)
    producer, worker = tokens(Role.PRODUCER, 150), tokens(Role.WORKER, 150)
    for start in (deployment.web, deployment.worker, deployment.beat):
        start()
    deployment.until_it_answers()

    with Load(deployment.port, producer, worker) as load:
        until(lambda: AuditedResult.objects.count() > 100, 60, every=0.2)
        before = time.monotonic()
        time.sleep(AWAY_SECONDS / 2)
        began = time.monotonic()
        with away(server):  # type: ignore[attr-defined]
            time.sleep(AWAY_SECONDS)
            back = time.monotonic()
        time.sleep(AWAY_SECONDS / 4)

    assert Counter(each.status for each in load.heard).keys() <= {200, 202, 204}
    calm, meanwhile = load.between(before, began), load.between(began, back)
    figures = {
        "requests": len(load.heard), "meanwhile": len(meanwhile), "tasks": len(load.made),
        "p99 before, ms": round(percentile_ms(calm), 1), "p99 meanwhile, ms": round(percentile_ms(meanwhile), 1),
        "longest meanwhile, ms": round(percentile_ms(meanwhile, 1.0), 1),
    }  # fmt: skip
    print(figures)
    # Other tests may run on this machine at the same time. A request that waited for PostgreSQL would take seconds.
    assert 2 * len(meanwhile) > len(calm), figures
    assert percentile_ms(meanwhile) < 2 * percentile_ms(calm) + (10 if LONG else 500), figures
    assert percentile_ms(meanwhile, 1.0) < (2000 if LONG else 4000), figures
    assert max(each.seconds for each in load.looks) < (5 if LONG else 8), "a readiness check hung"

    assert sorted(load.made) == sorted(load.done)
    server_is_back = time.monotonic()
    until(lambda: stream.lag() == 0, 60, every=0.2)
    print("caught up within", round(time.monotonic() - server_is_back, 1), "s of the load's end")
    audited = AuditedResult.objects.values_list("task_id", flat=True)
    assert sorted(map(str, audited)) == sorted(load.done)
    assert Attempt.objects.count() == len(load.done)
    assert not Quarantine.objects.exists()
