"""Health, readiness, metrics, and the administrator's routes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis

from codeq_site import views as site_views
from codeq_site.checks import check_redis
from core import errors, threadpool
from core.conf import conf
from core.http import health
from core.redis.connections import client as redis_client
from core.redis.partitions import PARTITIONS_KEY
from queues import health_checks, periodic_tasks
from queues import readiness as redis_readiness
from tenants.domain import TenantSnapshot
from tests.conftest import ValkeyFactory
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import NORTH, TASKS
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task
from tests.waiting import until_async

ADMIN = "/v1/codeq/admin"
MakeClient = Callable[..., Client]


@pytest.mark.spec("OBS-4", "The liveness check calls no other server")
async def test_healthz(anonymous: Client) -> None:
    response = await anonymous.get("/healthz")
    assert (response.status, response.json) == (200, {"status": "ok"})


@pytest.fixture
def redis_of_readiness(monkeypatch: pytest.MonkeyPatch, valkey_server: ValkeyFactory) -> Callable[..., Any]:
    """Return a function that starts a Valkey for the readiness check."""

    def use(**config: str) -> Any:
        server = valkey_server(**config)
        monkeypatch.setattr(redis_readiness, "client", lambda: redis.Redis.from_url(server.url, socket_timeout=1))
        monkeypatch.setattr(health, "CACHE_SECONDS", -1.0)
        return server

    return use


@pytest.mark.spec(
    "OBS-4", "Readiness checks Redis, its durability, its scripts and the database, and names the failing part"
)
async def test_readyz(anonymous: Client, redis_of_readiness: Callable[..., Any]) -> None:
    server = redis_of_readiness()
    response = await anonymous.get("/readyz")
    assert (response.status, response.json) == (200, {"status": "ok", "durability": "fsync"})
    connection = redis.Redis.from_url(server.url)
    for name, bad, good, problem in (
        ("appendfsync", "everysec", "always", "durability: appendfsync is not always"),
        ("maxmemory-policy", "allkeys-lru", "noeviction", "maxmemory-policy is not noeviction"),
        ("appendonly", "no", "yes", "durability: appendonly is off"),
    ):
        connection.config_set(name, bad)
        response = await anonymous.get("/readyz")
        assert (response.status, response.code) == (503, "unavailable"), name
        assert problem in response.json["detail"]
        assert response.headers["retry-after"] == "5"
        connection.config_set(name, good)
    connection.close()
    server.kill()
    response = await anonymous.get("/readyz")
    assert response.status == 503
    assert response.json["detail"] == "redis: does not answer"


@pytest.mark.parametrize(("allocator", "warnings"), [("jemalloc", 0), ("", 1)], ids=["preloaded", "reported"])
async def test_readyz_warns_of_an_allocator_that_fragments(
    anonymous: Client,
    redis_of_readiness: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    allocator: str,
    warnings: int,
) -> None:
    """The wheel's Valkey reports libc, although another allocator is preloaded."""
    redis_of_readiness()
    configured = msgspec.structs.replace(conf(), redis_allocator=allocator)
    monkeypatch.setattr(redis_readiness, "conf", lambda: configured)
    response = await anonymous.get("/readyz")
    assert response.status == 200
    assert len(response.json.get("warnings", [])) == warnings
    deployment = check_redis(databases=["default"])
    assert [message.id for message in deployment] == ["codeq.W023"] * warnings
    assert check_redis() == []
    checks = {check.name for check in health_checks.redis_servers()}
    assert ("Allocator" in checks) == bool(warnings)


async def test_relaxed_durability_is_reported(
    anonymous: Client, redis_of_readiness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_of_readiness(appendfsync="everysec")
    relaxed = msgspec.structs.replace(conf(), queues=msgspec.structs.replace(conf().queues, durability="relaxed"))
    for module in (health, redis_readiness):
        monkeypatch.setattr(module, "conf", lambda: relaxed)
    response = await anonymous.get("/readyz")
    assert (response.status, response.json["durability"]) == (200, "relaxed")


async def test_a_database_that_is_down_is_named(
    anonymous: Client, redis_of_readiness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_of_readiness()

    def down() -> str:
        return "database: does not answer"

    monkeypatch.setattr(health, "readiness", health.Readiness(redis_readiness.find_redis_problem, down))
    assert (await anonymous.get("/readyz")).json["detail"] == "database: does not answer"


def read_sample(text: str, name: str, **labels: str) -> float:
    """Return the value of one time series, or 0 if it does not exist."""
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if match and dict(re.findall(r'(\w+)="([^"]*)"', match.group(1) or "")) == labels:
            return float(match.group(2))
    return 0.0


async def test_readyz_reports_a_redis_with_other_partitions(
    anonymous: Client, redis_of_readiness: Callable[..., Any]
) -> None:
    server = redis_of_readiness()
    assert (await anonymous.get("/readyz")).status == 200
    with redis.Redis.from_url(server.url) as store:
        assert store.get(PARTITIONS_KEY) == b"16"  # written by the first check
        store.set(PARTITIONS_KEY, 8)
    response = await anonymous.get("/readyz")
    assert (response.status, response.json["detail"].partition(".")[0]) == (
        503,
        "redis: This Redis was set up with 8 partitions, but the settings have 16",
    )


async def test_hanging_check_occupies_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen PostgreSQL and a check every second must not use up the threads."""
    monkeypatch.setattr(health, "CHECK_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(health, "CACHE_SECONDS", -1.0)
    begun, thawed = [], threading.Event()

    def frozen() -> None:
        begun.append(1)
        thawed.wait(10)

    readiness = health.Readiness(lambda: None, frozen)
    try:
        for _ in range(2 * threadpool.POOL_THREADS):
            assert await readiness.problems() == ["a check did not end in time"]
        assert begun == [1]
    finally:
        thawed.set()

    async def is_ready() -> bool:
        return await readiness.problems() == []

    await until_async(is_ready)


async def test_hanging_database_work_times_out_and_does_not_delay_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threadpool, "DB_TIMEOUT_SECONDS", 0.2)
    thawed = threading.Event()
    try:
        calls = [threadpool.run_db(thawed.wait, 10) for _ in range(3 * threadpool.POOL_THREADS)]
        responses = asyncio.gather(*calls, return_exceptions=True)
        assert await threadpool.run_storage(lambda: "stored") == "stored"
        assert {type(response) for response in await responses} == {errors.Unavailable}
    finally:
        thawed.set()
    assert await threadpool.run_db(lambda: "back") == "back"


async def test_work_of_a_cancelled_request_is_not_started() -> None:
    thawed, begun = threading.Event(), []
    busy = [asyncio.ensure_future(threadpool.run_db(thawed.wait, 10)) for _ in range(threadpool.POOL_THREADS)]
    cancelled = asyncio.ensure_future(threadpool.run_db(begun.append, 1))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    thawed.set()
    await asyncio.gather(*busy)
    assert await threadpool.run_db(lambda: "after it") == "after it"
    assert begun == []


@pytest.mark.spec("OBS-1", "Created, claimed, completed, expired and latency are counted by command; depths are read")
async def test_metrics(anonymous: Client, producer: Client, worker: Client, stranger: Client) -> None:
    async def scraped() -> str:
        response = await anonymous.get("/metrics")
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain")
        return response.body.decode()

    before = await scraped()

    def grown(text: str, name: str, **labels: str) -> float:
        return read_sample(text, name, **labels) - read_sample(before, name, **labels)

    for number in range(5):
        await enqueue_task(producer, command="METERED", idempotencyKey=f"k-{number % 4}")
    await stranger.post(TASKS, {"command": "METERED", "payload": 1})
    done, failed = await claim_task(worker), await claim_task(worker)
    await worker.post(f"{TASKS}/{done['id']}/result", COMPLETED)
    await worker.post(f"{TASKS}/{failed['id']}/result", {"status": "FAILED", "error": "x"})
    left = await claim_task(worker)
    await producer.delete(f"{TASKS}/{left['id']}")
    await producer.get(f"{TASKS}/{left['id']}x")
    await threadpool.run_db(periodic_tasks.run_drain, lambda: True)
    after = await scraped()
    assert grown(after, "codeq_task_created_total", command="METERED") == 5
    assert grown(after, "codeq_task_claimed_total", command="METERED") == 3
    for status in ("COMPLETED", "FAILED", "CANCELLED"):
        assert grown(after, "codeq_task_completed_total", command="METERED", status=status) == 1
    latency = "codeq_task_processing_latency_seconds_count"
    assert grown(after, latency, command="METERED", status="COMPLETED") == 1
    # The sum of both tenants: one task each.
    assert read_sample(after, "codeq_queue_depth", command="METERED", queue="ready") == 2
    assert read_sample(after, "codeq_queue_depth", command="METERED", queue="in_progress") == 0
    assert read_sample(after, "codeq_depths_complete") == 1
    assert "codeq_dlq_depth" in after
    assert grown(after, "codeq_http_errors_total", status="404", code="task_not_found") == 1


async def test_process_without_counts_does_not_break_a_scrape(anonymous: Client) -> None:
    own = (conf().home_path / "metrics").glob("*")
    files = [folder / "counter_999999999.db" for folder in own]
    assert files
    for file in files:
        file.touch()
    try:
        assert (await anonymous.get("/metrics")).status == 200
    finally:
        for file in files:
            file.unlink()


@pytest.mark.spec("TEN-3", "Metrics name no tenant; with the setting, or in production, only operators can read them")
async def test_metrics_name_no_tenant_and_can_be_closed(
    anonymous: Client, producer: Client, admin: Client, client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue_task(producer, payload="payload-canary", idempotencyKey="key-canary")
    text = (await anonymous.get("/metrics")).body.decode()
    for secret in (NORTH, "canary", "tenant"):
        assert secret not in text
    closed = msgspec.structs.replace(conf(), web=msgspec.structs.replace(conf().web, metrics="operator"))
    for settings in (closed, msgspec.structs.replace(conf(), production=True)):
        monkeypatch.setattr(site_views, "conf", lambda settings=settings: settings)
        assert (await anonymous.get("/metrics")).status == 401
        assert (await admin.get("/metrics")).status == 403
        assert (await client("operator").get("/metrics")).status == 200


async def test_number_of_series_is_limited(
    producer: Client, anonymous: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core import metrics

    monkeypatch.setattr(metrics, "MAX_LABELS", len(metrics._labels) + 3)
    for number in range(10):
        await enqueue_task(producer, command=f"MANY-{number}")
    text = (await anonymous.get("/metrics")).body.decode()
    named = {line for line in text.splitlines() if line.startswith("codeq_task_created_total{") and "MANY-" in line}
    assert len(named) == 3
    assert read_sample(text, "codeq_task_created_total", command="other") >= 7


async def test_signing_keys_are_public(anonymous: Client) -> None:
    response = await anonymous.get("/.well-known/jwks.json")
    assert response.status == 200
    assert response.headers["content-type"] == "application/jwk-set+json"
    (key,) = response.json["keys"]
    assert key["alg"] == "ES256"
    assert "d" not in key


@pytest.mark.spec("ADM-5", "An administrator reads the depths of the tenant's queues")
@pytest.mark.spec("QUE-6", "Stats are exact")
async def test_queue_stats(producer: Client, worker: Client, admin: Client) -> None:
    for priority in (0, 0, 7):
        await enqueue_task(producer, command="A", priority=priority)
    await enqueue_task(producer, command="A", delaySeconds=100)
    await enqueue_task(producer, command="B", maxAttempts=1)
    dead = await claim_task(worker, commands=["B"])
    await worker.post(f"{TASKS}/{dead['id']}/nack")
    await claim_task(worker, commands=["A"])
    response = await admin.get(f"{ADMIN}/queues/A")
    stats = response.json
    assert stats.pop("oldestReadySeconds") >= 0
    assert stats == {
        "command": "A", "ready": 2, "delayed": 1, "inProgress": 1, "dlq": 0, "paused": False,
        "readyByPriority": [2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip
    queues = (await admin.get(f"{ADMIN}/queues")).json["queues"]
    assert [(queue["command"], queue["dlq"]) for queue in queues] == [("A", 0), ("B", 1)]
    unused = (await admin.get(f"{ADMIN}/queues/NEVER")).json
    assert (unused["ready"], unused["paused"]) == (0, False)


@pytest.mark.spec("ADM-5", "A paused queue accepts tasks and gives out none until it is resumed")
async def test_pause_and_resume(producer: Client, worker: Client, admin: Client) -> None:
    await enqueue_task(producer, command="A")
    running = await claim_task(worker)
    response = await admin.post(f"{ADMIN}/queues/A/pause")
    assert (response.status, response.json) == (200, {"command": "A", "paused": True})
    waiting = await enqueue_task(producer, command="A")
    assert (await worker.post(f"{TASKS}/claim")).status == 204
    assert (await worker.post(f"{TASKS}/{running['id']}/result", COMPLETED)).status == 200
    assert (await admin.get(f"{ADMIN}/queues/A")).json["paused"] is True
    assert (await admin.post(f"{ADMIN}/queues/A/resume")).json == {"command": "A", "paused": False}
    assert (await claim_task(worker))["id"] == waiting["id"]


@pytest.mark.spec("CLN-1", "An administrator deletes ended tasks up to a limit, and no task that is not audited")
@pytest.mark.spec("CLN-2", "Live work is never removed")
async def test_cleanup(producer: Client, worker: Client, admin: Client, tenant: TenantSnapshot) -> None:
    for _ in range(3):
        task = await enqueue_task(producer)
        await claim_task(worker)
        await worker.post(f"{TASKS}/{task['id']}/result", COMPLETED)
    live = await enqueue_task(producer)
    # Their retention of one day has ended.
    for key in redis_client().keys("codeq:*:expiry:*"):
        for member in redis_client().zrange(key, 0, -1):
            redis_client().zincrby(key, -tenant.retention_ms, member)
    unaudited = await admin.post(f"{ADMIN}/tasks/cleanup", {})
    assert unaudited.json["deleted"] == 0
    await threadpool.run_db(periodic_tasks.run_drain, lambda: True)
    first = await admin.post(f"{ADMIN}/tasks/cleanup", {"limit": 2})
    assert (first.status, first.json["deleted"], first.json["limit"]) == (200, 2, 2)
    rest = await admin.post(f"{ADMIN}/tasks/cleanup")
    assert (rest.json["limit"], rest.json["deleted"]) == (1000, 1)
    assert (await producer.get(f"{TASKS}/{live['id']}")).json["status"] == "PENDING"
    early = await admin.post(f"{ADMIN}/tasks/cleanup", {"before": "2020-01-01T00:00:00+01:00"})
    assert early.json == {"deleted": 0, "before": "2020-01-01T00:00:00+01:00", "limit": 1000}


@pytest.mark.parametrize(
    "body", [{"limit": 0}, {"limit": 10_001}, {"before": "2020-01-01T00:00:00"}, {"before": 1}, {"x": 1}]
)
async def test_invalid_cleanup_is_refused(admin: Client, body: dict[str, Any]) -> None:
    response = await admin.post(f"{ADMIN}/tasks/cleanup", body)
    assert (response.status, response.code) == (400, "invalid_request")


def test_redis_that_is_down_does_not_prevent_a_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise redis.exceptions.ConnectionError

    monkeypatch.setattr("codeq_site.checks.primaries", refuse)
    [message] = check_redis(databases=["default"])
    assert (message.id, message.is_serious()) == ("codeq.W022", False)
