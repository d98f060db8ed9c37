"""PostgreSQL frozen or restarted under load: no effect on the API, and a complete audit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from django.core.management import call_command
from django.db import connection

from codeq_site.devserver.embedded import PostgreSQL
from queues.audit import stream
from queues.models import Attempt, AuditedResult, Quarantine
from tenants import services
from tenants.auth import installation_keys
from tenants.domain import CallerRole
from tests.faults.deployment import Deployment, database_at, freeze, thaw
from tests.faults.load import Load, RequestRecord, compute_percentile_ms
from tests.queues.engine.checked_engine import LONG
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
OUTAGE_SECONDS = 60 if LONG else 10
TENANT = "north"


@contextmanager
def freeze_server(server: PostgreSQL) -> Iterator[None]:
    processes = freeze(server.pid)
    try:
        yield
    finally:
        thaw(processes)


@contextmanager
def stop_server(server: PostgreSQL) -> Iterator[None]:
    connection.close()  # this test's connection
    server.stop()
    yield
    server.start()


def issue_tokens(role: CallerRole, count: int) -> list[str]:
    return [services.issue_token(TENANT, role, subject=f"{role}-1") for _ in range(count)]


@pytest.fixture
def server(postgres_server: Callable[..., PostgreSQL]) -> Iterator[PostgreSQL]:
    server = postgres_server(fsync="off")
    installation_keys.own_keys.forget()
    with database_at(server.url):
        call_command("migrate", verbosity=0, skip_checks=True)
        yield server
    installation_keys.own_keys.forget()


@pytest.fixture
def deployment(server: PostgreSQL, tmp_path: Path) -> Iterator[Deployment]:
    # With a cache of one second, keys are read and tokens verified again while PostgreSQL is unavailable.
    deployment = Deployment(tmp_path, server.url, CODEQ_AUTH_CACHE_SECONDS="1")
    yield deployment
    deployment.close()


def compute_median_rate(records: Sequence[RequestRecord]) -> float:
    """Return the median number of requests per second."""
    return median(Counter(int(record.started - records[0].started) for record in records).values())


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "BEA-1", "PostgreSQL unavailable under load: no request fails or waits, no row is missing or duplicated"
)
@pytest.mark.parametrize("interrupt", [freeze_server, stop_server], ids=["frozen", "stopped"])
def test_api_is_not_affected_while_postgresql_is_unavailable(
    server: PostgreSQL,
    deployment: Deployment,
    interrupt: Callable[[PostgreSQL], object],
) -> None:
    services.create_tenant(TENANT)
    producer, worker = issue_tokens(CallerRole.PRODUCER, 150), issue_tokens(CallerRole.WORKER, 150)
    for start in (deployment.web, deployment.worker, deployment.beat):
        start()
    deployment.wait_until_it_accepts_connections()

    with Load(deployment.port, producer, worker) as load:
        until(lambda: AuditedResult.objects.count() > 100, 60, every=0.2)
        before = time.monotonic()
        time.sleep(OUTAGE_SECONDS / 2)
        outage_started = time.monotonic()
        with interrupt(server):  # type: ignore[attr-defined]
            time.sleep(OUTAGE_SECONDS)
            outage_ended = time.monotonic()
        time.sleep(OUTAGE_SECONDS / 4)

    assert Counter(record.status for record in load.records).keys() <= {200, 202, 204}
    calm, outage = load.between(before, outage_started), load.between(outage_started, outage_ended)
    slow = [record for record in outage if record.seconds > 1]
    probes = [record for record in load.probes if outage_started <= record.started < outage_ended]
    figures = {
        "requests": len(load.records), "during the outage": len(outage), "tasks": len(load.created), "slow": len(slow),
        "per second before": compute_median_rate(calm), "per second during the outage": compute_median_rate(outage),
        "p50 before, ms": round(compute_percentile_ms(calm, 0.5), 1),
        "p50 during the outage, ms": round(compute_percentile_ms(outage, 0.5), 1),
        "p99 before, ms": round(compute_percentile_ms(calm), 1),
        "p99 during the outage, ms": round(compute_percentile_ms(outage), 1),
        "longest during the outage, ms": round(compute_percentile_ms(outage, 1.0), 1),
        "probes, s": [round(record.seconds, 1) for record in probes],
    }  # fmt: skip
    print(figures)
    # Other tests on this machine may cause stalls, which affect single seconds and each connection once. A wait for
    # PostgreSQL would affect every connection at every new token, every two seconds.
    assert compute_median_rate(outage) > compute_median_rate(calm) / 2, figures
    assert compute_percentile_ms(outage, 0.5) < 2 * compute_percentile_ms(calm, 0.5) + 10, figures
    assert len(slow) <= load.connections, figures
    if LONG:
        assert compute_percentile_ms(outage) < 2 * compute_percentile_ms(calm) + 10, figures
        assert compute_percentile_ms(outage, 1.0) < 2000, figures
    # A health check times out after three seconds.
    assert median(record.seconds for record in probes) < 4, figures
    assert max(record.seconds for record in load.probes) < (5 if LONG else 8), figures

    assert sorted(load.created) == sorted(load.completed)
    load_ended = time.monotonic()
    until(lambda: stream.lag() == 0, 60, every=0.2)
    print("caught up within", round(time.monotonic() - load_ended, 1), "s of the load's end")
    audited = AuditedResult.objects.values_list("task_id", flat=True)
    assert sorted(map(str, audited)) == sorted(load.completed)
    assert Attempt.objects.count() == len(load.completed)
    assert not Quarantine.objects.exists()
