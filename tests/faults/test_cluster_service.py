"""The service on a Redis Cluster of three primaries: web, Celery worker and beat."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from django.conf import settings
from django.test import Client as Browser

from codeq_site.beat_schedule import PERIODIC_TASKS
from codeq_site.devserver.embedded import DURABLE, Valkey
from core.errors import ConfigError
from core.redis import cluster as clusters
from core.redis.connections import settle_partitions
from core.redis.partitions import partition_of
from core.redis.runners import ClusterRunner
from core.redis.script_call import merge_calls
from queues import readiness
from queues.domain import QueueStats
from queues.engine import Engine, Options, keys, queries
from queues.models import Attempt, AuditedResult, PeriodicTaskRun, Quarantine
from tenants import services
from tenants.auth import installation_keys as signing
from tenants.cache import tenant_cache
from tenants.domain import CallerRole
from tests.conftest import free_port
from tests.factories import UserFactory
from tests.faults.cluster import Cluster, FlushableClient, find_slot
from tests.faults.deployment import Deployment, freeze, get_database_url, thaw
from tests.faults.load import TASKS, Client, Load, RequestRecord
from tests.queues.engine.checked_engine import LONG
from tests.waiting import until
from webhooks.models import Delivery

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey"), pytest.mark.real_time]
PARTITIONS = 16
MOVES = 30 if LONG else 4


class NodeTenant(NamedTuple):
    """A tenant whose tasks are on a known node."""

    tid: str
    node: int
    producer: str
    worker: str


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    directory = tmp_path / "cluster"
    directory.mkdir()
    # A long timeout, so that no node is considered failed on a busy machine.
    cluster = Cluster(directory, **{"appendfsync": "always", "cluster-node-timeout": "10000"})
    yield cluster
    cluster.close()


@pytest.fixture
def store(cluster: Cluster) -> Iterator[FlushableClient]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def tenants(cluster: Cluster) -> Mapping[int, NodeTenant]:
    """A tenant on each node."""
    signing.own_keys.forget()
    tenants_by_node: dict[int, NodeTenant] = {}
    while len(tenants_by_node) < len(cluster.servers):
        slug = f"tenant-{time.monotonic_ns()}"
        tid = services.create_tenant(slug).tid
        node = cluster.find_owner(find_slot(partition_of(tid, PARTITIONS)))
        if node not in tenants_by_node:
            producer = services.issue_token(slug, CallerRole.PRODUCER)
            tenants_by_node[node] = NodeTenant(
                tid, node, producer, services.issue_token(slug, CallerRole.WORKER, subject="w1")
            )
    return tenants_by_node


@pytest.fixture
def deployment(cluster: Cluster, tenants: Mapping[int, NodeTenant], tmp_path: Path) -> Iterator[Deployment]:
    ports = ",".join(f"127.0.0.1:{port}" for port in cluster.ports)
    deployment = Deployment(
        tmp_path,
        get_database_url(),
        REDIS_URL=f"redis://{ports}/0",
        CODEQ_REDIS_CLUSTER="true",
        CODEQ_PARTITIONS=str(PARTITIONS),
    )
    for start in (deployment.web, deployment.worker, deployment.beat):
        start()
    deployment.wait_until_it_accepts_connections()
    yield deployment
    deployment.close()
    signing.own_keys.forget()
    tenant_cache.stop()


class TenantClient:
    """A client of one tenant, with a connection for each of its roles."""

    def __init__(self, port: int, tenant: NodeTenant, stack: ExitStack) -> None:
        self.records: list[RequestRecord] = []
        self.tenant = tenant
        self.producer, self.worker = (
            stack.enter_context(closing(Client(port, [token], self.records)))
            for token in (tenant.producer, tenant.worker)
        )

    def enqueue(self, **more: object) -> str:
        status, task = self.producer.request("POST", TASKS, {"command": "render", "payload": {}, **more})
        assert status == 202, task.get("detail")
        return str(task["id"])

    def claim(self, seconds: float = 0) -> dict[str, Any] | None:
        body = {"commands": ["render"], "leaseSeconds": 60, "waitSeconds": seconds}
        status, task = self.worker.request("POST", f"{TASKS}/claim", body)
        assert status in (200, 204), task
        return task if status == 200 else None

    def complete(self, task_id: str) -> None:
        status, answer = self.worker.request(
            "POST", f"{TASKS}/{task_id}/result", {"status": "COMPLETED", "result": {"n": 1}}
        )
        assert status == 200, answer

    def result(self, task_id: str, seconds: float = 0) -> tuple[int, Any]:
        return self.producer.request("GET", f"{TASKS}/{task_id}/result?waitSeconds={seconds}")


def fetch(deployment: Deployment, path: str, cookie: str = "") -> tuple[int, str]:
    request = urllib.request.Request(deployment.base + path, headers={"Cookie": cookie})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_waiting(store: FlushableClient, tenant: NodeTenant) -> Callable[[], bool]:
    partition_keys = keys.of_partition(partition_of(tenant.tid, PARTITIONS))
    return lambda: store.zscore(partition_keys.waiting, f"{tenant.tid}:render") is not None


def list_remaining(store: FlushableClient, tenants: Mapping[int, NodeTenant]) -> list[QueueStats]:
    """Return the queues that are not empty."""
    engine = Engine(ClusterRunner(store), Options(partitions=PARTITIONS))
    results = merge_calls(engine.runner, [queries.stats(engine, tenant.tid) for tenant in tenants.values()]).run_sync()
    return [
        queue
        for queues in results
        for queue in queues
        if queue.ready or queue.delayed or queue.in_progress or queue.dlq
    ]


def create_console_cookie() -> str:
    browser = Browser()
    browser.force_login(UserFactory(is_superuser=True))
    return f"{settings.SESSION_COOKIE_NAME}={browser.cookies[settings.SESSION_COOKIE_NAME].value}"


@pytest.mark.timeout(300)
@pytest.mark.spec("QUE-5", "The service on a Redis Cluster: the whole life cycle of a task, on every primary")
def test_life_cycle_of_a_task_on_every_primary(
    deployment: Deployment, cluster: Cluster, store: FlushableClient, tenants: Mapping[int, NodeTenant]
) -> None:
    until(lambda: fetch(deployment, "/readyz") == (200, '{"status":"ok","durability":"fsync"}'), 30)
    completed = []
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        for tenant in tenants.values():
            client = TenantClient(deployment.port, tenant, stack)
            # The process subscribes to one node, and must also receive messages that scripts publish on the others.
            started = time.monotonic()
            pending_claim = pool.submit(client.claim, 25)
            until(is_waiting(store, tenant))
            task_id = client.enqueue(webhook=f"http://127.0.0.1:{free_port()}/")
            claimed = pending_claim.result()
            assert claimed
            assert claimed["id"] == task_id
            pending_result = pool.submit(TenantClient(deployment.port, tenant, stack).result, task_id, 25)
            client.complete(task_id)
            status, result = pending_result.result()
            assert (status, result["result"]["result"]) == (200, {"n": 1})
            assert time.monotonic() - started < 20, "a long poll timed out instead of being woken"
            completed += [task_id, *(client.enqueue() for _ in range(3))]
            for task in iter(client.claim, None):
                client.complete(task["id"])
        move_under_load(deployment, cluster, tenants, stack)

    until(lambda: Delivery.objects.filter(task_id__in=completed).count() == len(tenants))
    until(lambda: {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} >= set(completed))
    assert not Quarantine.objects.exists()
    cookie = create_console_cookie()
    status, overview = fetch(deployment, "/admin/console/overview.json?pulses", cookie)
    assert status == 200
    assert {row["tid"] for row in json.loads(overview)["queues"]} == {tenant.tid for tenant in tenants.values()}
    assert {check["name"]: check["message"] for check in json.loads(overview)["checks"]}[
        "Redis"
    ] == "3 primaries answer"
    assert fetch(deployment, "/admin/", cookie)[0] == 200
    text = fetch(deployment, "/metrics")[1]
    assert "codeq_depths_complete 1.0" in text
    assert 'codeq_queue_depth{command="render",queue="ready"} 0.0' in text
    jobs = {job.name: job for job in PeriodicTaskRun.objects.all()}
    assert {"drain", "repair", "deliver"} <= jobs.keys() <= PERIODIC_TASKS.keys()
    assert [(job.name, job.error) for job in jobs.values() if job.failures] == []
    assert list_remaining(store, tenants) == []
    assert "CROSSSLOT" not in cluster.count_errors()


def move_under_load(
    deployment: Deployment, cluster: Cluster, tenants: Mapping[int, NodeTenant], stack: ExitStack
) -> None:
    """Move a tenant's slot under load. No request may fail, and no task may be lost."""
    tenant = tenants[0]
    slot = find_slot(partition_of(tenant.tid, PARTITIONS))
    with Load(deployment.port, [tenant.producer] * 3, [tenant.worker] * 3) as load:
        until(lambda: len(load.completed) > 20)
        for number in range(MOVES):
            cluster.move(slot, (cluster.find_owner(slot) + 1) % 3, pause=0.005)
            target = len(load.completed) + 20
            until(lambda target=target: len(load.completed) > target)
            if number % 2:
                cluster.move_atomically(slot, (cluster.find_owner(slot) + 1) % 3)
    statuses = Counter(record.status for record in load.records)
    print(dict(statuses), cluster.count_errors())
    assert statuses.keys() <= {200, 202, 204}
    assert sorted(load.created) == sorted(load.completed)
    assert cluster.count_errors()["TRYAGAIN"] > 0  # the load was affected by the moves


@pytest.mark.timeout(300)
@pytest.mark.spec(
    "ENQ-2",
    "When a primary of a Redis Cluster fails, other tenants continue, including their audit, and it is reported",
)
@pytest.mark.parametrize("ending", ["killed", "frozen"] if LONG else ["killed"])
def test_failed_primary_affects_only_its_tenants(
    deployment: Deployment, cluster: Cluster, store: FlushableClient, tenants: Mapping[int, NodeTenant], ending: str
) -> None:
    # The node that has the locks of all periodic tasks.
    failed = cluster.find_owner(find_slot(0))
    others = [tenant for tenant in tenants.values() if tenant.node != failed]
    cookie = create_console_cookie()
    with ExitStack() as stack:
        affected = TenantClient(deployment.port, tenants[failed], stack)
        affected_ids = [affected.enqueue() for _ in range(5)]
        clients = [TenantClient(deployment.port, tenant, stack) for tenant in others]
        first_ids = [client.enqueue() for client in clients]
        until(lambda: PeriodicTaskRun.objects.filter(name="drain").exists())
        frozen = freeze(cluster.servers[failed].pid) if ending == "frozen" else []
        if not frozen:
            cluster.servers[failed].kill()

        completed = []
        for client, task_id in zip(clients, first_ids, strict=True):
            # A claim that is lost with its process returns to the queue at once, even while a node is unreachable.
            completed += [task_id, *(client.enqueue() for _ in range(5))]
            for task in iter(client.claim, None):
                client.complete(task["id"])
        response = affected.producer.request("POST", TASKS, {"command": "render", "payload": {}})
        assert (response[0], response[1]["code"]) == (503, "unavailable")
        # Periodic tasks take their locks on another node, and skip unreachable partitions.
        until(lambda: {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} >= set(completed))
        ready = json.loads(until(lambda: (response := fetch(deployment, "/readyz"))[0] == 503 and response[1]))
        assert ready["detail"] == f"redis: not serving: 127.0.0.1:{cluster.ports[failed]}"
        assert "codeq_depths_complete 0.0" in fetch(deployment, "/metrics")[1]
        status, overview = fetch(deployment, "/admin/console/overview.json", cookie)
        assert status == 200
        assert {row["tid"] for row in json.loads(overview)["queues"]} == {tenant.tid for tenant in others}
        checks = {check["name"]: check["message"] for check in json.loads(overview)["checks"]}
        assert checks["Redis"] == f"no answer from 127.0.0.1:{cluster.ports[failed]}"

        thaw(frozen) if frozen else cluster.servers[failed].start()
        for task_id in affected_ids:
            task = until(lambda: claim_or_none(affected))
            assert task["id"] == task_id  # all tasks, in order
            affected.complete(task["id"])
        for task in iter(affected.claim, None):  # a frozen node may still run a request that was answered with 503
            assert frozen
            affected_ids.append(task["id"])
            affected.complete(task["id"])
        until(
            lambda: (
                {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} >= {*affected_ids, *completed}
            )
        )
        until(lambda: fetch(deployment, "/readyz")[0] == 200)
        records = [record for client in clients for record in client.records]
        assert [record for record in records if record.status not in (200, 202, 204)] == []
        # A request to the frozen node waits for five seconds.
        assert not frozen or max(record.seconds for record in records) < 4.5, "a request waited for the frozen node"
        assert Attempt.objects.count() == len(affected_ids) + len(completed)
        assert list_remaining(store, tenants) == []
        assert "CROSSSLOT" not in cluster.count_errors()

        # The process subscribes to one node. If that node fails, long polls are woken through another.
        (subscribed,) = [n for n, node in enumerate(cluster.nodes) if node.client_list(_type="pubsub")]
        cluster.servers[subscribed].kill()
        client = TenantClient(
            deployment.port, next(tenant for tenant in tenants.values() if tenant.node != subscribed), stack
        )
        pending_claim = stack.enter_context(ThreadPoolExecutor(1)).submit(client.claim, 25)
        until(is_waiting(store, client.tenant))
        started, task_id = time.monotonic(), client.enqueue()
        assert (pending_claim.result() or {})["id"] == task_id
        assert time.monotonic() - started < 15


@pytest.mark.timeout(300)
@pytest.mark.spec(
    "ENQ-2", "A replica that takes over is used: a manual failover causes no failures, an automatic one only short ones"
)
def test_replica_takes_over(
    deployment: Deployment, cluster: Cluster, tenants: Mapping[int, NodeTenant], tmp_path: Path
) -> None:
    replicas = cluster.add_replicas(tmp_path / "cluster", appendfsync="always")
    tenant = tenants[0]
    with Load(deployment.port, [tenant.producer] * 3, [tenant.worker] * 3) as load:
        until(lambda: len(load.completed) > 20)
        replicas[0].execute_command("CLUSTER", "FAILOVER")
        until(lambda: replicas[0].info("replication")["role"] == "master")
        target = len(load.completed) + 50
        until(lambda: len(load.completed) > target)
    assert Counter(record.status for record in load.records).keys() <= {200, 202, 204}
    assert sorted(load.created) == sorted(load.completed)

    # The new primary fails, and its replica, the former primary, takes over automatically.
    for node in (*cluster.nodes, *replicas):
        node.config_set("cluster-node-timeout", 2000)
    with Load(deployment.port, [tenant.producer] * 3, [tenant.worker] * 3) as load:
        until(lambda: len(load.completed) > 20)
        failed_at = time.monotonic()
        cluster.replicas[0].kill()
        until(lambda: cluster.nodes[0].info("replication")["role"] == "master")
        target = len(load.completed) + 50
        until(lambda: len(load.completed) > target)
        outage_seconds = (
            max(record.started for record in load.records if record.status not in (200, 202, 204)) - failed_at
        )
    print(
        f"503 for {outage_seconds:.1f} s",
        Counter(record.status for record in load.records),
        len(load.created) - len(load.completed),
    )
    assert Counter(record.status for record in load.records).keys() <= {200, 202, 204, 503, 409, 404}
    for replica in replicas:
        replica.close()


def claim_or_none(client: TenantClient) -> dict[str, Any] | None:
    status, task = client.worker.request("POST", f"{TASKS}/claim", {"commands": ["render"], "leaseSeconds": 60})
    return task if status == 200 else None


@pytest.mark.spec("OBS-4", "Readiness checks the settings of every primary, and names one with a wrong setting")
def test_every_primary_must_be_durable(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(clusters.ClusterClient(cluster.servers[0].url)) as store:
        monkeypatch.setattr(readiness, "client", lambda: store)
        assert readiness.find_redis_problem() is None
        for number, node in enumerate(cluster.nodes):
            for name, bad, good, problem in (
                ("appendfsync", "everysec", "always", "durability: appendfsync is not always"),
                ("maxmemory-policy", "allkeys-lru", "noeviction", "redis: maxmemory-policy is not noeviction"),
            ):
                node.config_set(name, bad)
                missing = readiness.find_redis_problem() or ""
                assert missing.startswith(problem)
                assert missing.endswith(f"(127.0.0.1:{cluster.ports[number]})")
                node.config_set(name, good)


@pytest.mark.spec("QUE-5", "A process with wrong settings for its servers does not start, and reports the reason")
def test_wrong_cluster_setting_is_rejected(cluster: Cluster, valkey: Valkey, tmp_path: Path) -> None:
    node = cluster.servers[0].url
    with redis.Redis.from_url(node) as plain, pytest.raises(ConfigError, match="set CODEQ_REDIS_CLUSTER=true"):
        settle_partitions(plain)
    with (
        start_valkey_on_tcp(tmp_path) as single,
        closing(clusters.ClusterClient(single)) as clustered,
        pytest.raises(ConfigError, match="unset CODEQ_REDIS_CLUSTER"),
    ):
        settle_partitions(clustered)
    with pytest.raises(ConfigError, match="REDIS_URL has no host of a cluster node"):
        clusters.ClusterClient(valkey.url)
    environment = {"REDIS_URL": node, "CODEQ_REDIS_CLUSTER": "true", "CELERY_BROKER_URL": node}
    with closing(Deployment(tmp_path, get_database_url(), **environment)) as deployment:
        assert deployment.worker().wait(60) != 0
        assert "CELERY_BROKER_URL names a node of a Redis Cluster" in deployment.log("worker").read_text()


@contextmanager
def start_valkey_on_tcp(tmp_path: Path) -> Iterator[str]:
    port = str(free_port())
    server = Valkey(tmp_path / "single", tmp_path / "single.txt", tmp_path / "s.sock", {**DURABLE, "port": port})
    server.start()
    try:
        yield server.url
    finally:
        server.kill()
