"""The whole service on a Redis Cluster: web, Celery worker and beat on three primaries, one of which goes away."""

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
from django.contrib.auth import get_user_model
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
from queues.models import Attempt, AuditedResult, BeatJob, Quarantine
from tenants import services
from tenants.auth import installation_keys as signing
from tenants.cache import tenant_cache
from tenants.tenant import Role
from tests.conftest import free_port
from tests.faults.cluster import Client as Store
from tests.faults.cluster import Cluster, slot_of
from tests.faults.deployment import Deployment, freeze, own_database, thaw
from tests.faults.load import TASKS, Answered, Client, Load
from tests.queues.engine.world import LONG
from tests.waiting import until
from webhooks.models import Delivery

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey"), pytest.mark.real_time]
PARTITIONS = 16
MOVES = 30 if LONG else 4


class Tenant(NamedTuple):
    """One whose tasks are on a certain node."""

    tid: str
    node: int
    producer: str
    worker: str


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    directory = tmp_path / "cluster"
    directory.mkdir()
    # On a busy machine nobody is to be taken for dead.
    cluster = Cluster(directory, **{"appendfsync": "always", "cluster-node-timeout": "10000"})
    yield cluster
    cluster.close()


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def tenants(cluster: Cluster) -> Mapping[int, Tenant]:
    """One of each node."""
    signing.own_keys.forget()
    found: dict[int, Tenant] = {}
    while len(found) < len(cluster.servers):
        slug = f"tenant-{time.monotonic_ns()}"
        tid = services.create_tenant(slug).tid
        node = cluster.owner(slot_of(partition_of(tid, PARTITIONS)))
        if node not in found:
            producer = services.issue_token(slug, Role.PRODUCER)
            found[node] = Tenant(tid, node, producer, services.issue_token(slug, Role.WORKER, subject="w1"))
    return found


@pytest.fixture
def deployment(cluster: Cluster, tenants: Mapping[int, Tenant], tmp_path: Path) -> Iterator[Deployment]:
    ports = ",".join(f"127.0.0.1:{port}" for port in cluster.ports)
    deployment = Deployment(
        tmp_path,
        own_database(),
        REDIS_URL=f"redis://{ports}/0",
        CODEQ_REDIS_CLUSTER="true",
        CODEQ_PARTITIONS=str(PARTITIONS),
    )
    for start in (deployment.web, deployment.worker, deployment.beat):
        start()
    deployment.until_it_answers()
    yield deployment
    deployment.close()
    signing.own_keys.forget()
    tenant_cache.stop()


class Asker:
    """Asks as one tenant, in one connection for each of its roles."""

    def __init__(self, port: int, tenant: Tenant, stack: ExitStack) -> None:
        self.heard: list[Answered] = []
        self.tenant = tenant
        self.producer, self.worker = (
            stack.enter_context(closing(Client(port, [token], self.heard)))
            for token in (tenant.producer, tenant.worker)
        )

    def enqueue(self, **more: object) -> str:
        status, task = self.producer.ask("POST", TASKS, {"command": "render", "payload": {}, **more})
        assert status == 202, task.get("detail")
        return str(task["id"])

    def claim(self, seconds: float = 0) -> dict[str, Any] | None:
        asked = {"commands": ["render"], "leaseSeconds": 60, "waitSeconds": seconds}
        status, task = self.worker.ask("POST", f"{TASKS}/claim", asked)
        assert status in (200, 204), task
        return task if status == 200 else None

    def complete(self, task_id: str) -> None:
        status, said = self.worker.ask("POST", f"{TASKS}/{task_id}/result", {"status": "COMPLETED", "result": {"n": 1}})
        assert status == 200, said

    def result(self, task_id: str, seconds: float = 0) -> tuple[int, Any]:
        return self.producer.ask("GET", f"{TASKS}/{task_id}/result?waitSeconds={seconds}")


def look(deployment: Deployment, path: str, cookie: str = "") -> tuple[int, str]:
    asked = urllib.request.Request(deployment.base + path, headers={"Cookie": cookie})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_waited_for(store: Store, tenant: Tenant) -> Callable[[], bool]:
    of = keys.of_partition(partition_of(tenant.tid, PARTITIONS))
    return lambda: store.zscore(of.waiting, f"{tenant.tid}:render") is not None


def left(store: Store, tenants: Mapping[int, Tenant]) -> list[QueueStats]:
    """Queues that hold anything."""
    engine = Engine(ClusterRunner(store), Options(partitions=PARTITIONS))
    found = merge_calls(engine.runner, [queries.stats(engine, tenant.tid) for tenant in tenants.values()]).run_sync()
    return [
        queue for queues in found for queue in queues if queue.ready or queue.delayed or queue.in_progress or queue.dlq
    ]


def console_cookie() -> str:
    browser = Browser()
    browser.force_login(get_user_model().objects.create_superuser("root", password=None))
    return f"{settings.SESSION_COOKIE_NAME}={browser.cookies[settings.SESSION_COOKIE_NAME].value}"


@pytest.mark.timeout(300)
@pytest.mark.spec("QUE-5", "The service on a Redis Cluster: a task's whole way, whichever primary its tenant is on")
def test_a_tasks_whole_way_on_every_primary(
    deployment: Deployment, cluster: Cluster, store: Store, tenants: Mapping[int, Tenant]
) -> None:
    until(lambda: look(deployment, "/readyz") == (200, '{"status":"ok","durability":"fsync"}'), 30)
    done = []
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        for tenant in tenants.values():
            asker = Asker(deployment.port, tenant, stack)
            # The process has one subscription, to one node: it hears what scripts publish on the two others.
            began = time.monotonic()
            parked = pool.submit(asker.claim, 25)
            until(is_waited_for(store, tenant))
            task_id = asker.enqueue(webhook=f"http://127.0.0.1:{free_port()}/")
            claimed = parked.result()
            assert claimed
            assert claimed["id"] == task_id
            waiting = pool.submit(Asker(deployment.port, tenant, stack).result, task_id, 25)
            asker.complete(task_id)
            status, ended = waiting.result()
            assert (status, ended["result"]["result"]) == (200, {"n": 1})
            assert time.monotonic() - began < 20, "nobody was woken: a wait ended by itself"
            done += [task_id, *(asker.enqueue() for _ in range(3))]
            for waits in iter(asker.claim, None):
                asker.complete(waits["id"])
        move_under_load(deployment, cluster, tenants, stack)

    until(lambda: Delivery.objects.filter(task_id__in=done).count() == len(tenants))
    until(lambda: {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} >= set(done))
    assert not Quarantine.objects.exists()
    cookie = console_cookie()
    status, overview = look(deployment, "/admin/console/overview.json?pulses", cookie)
    assert status == 200
    assert {row["tid"] for row in json.loads(overview)["rows"]} == {tenant.tid for tenant in tenants.values()}
    assert {sign["name"]: sign["says"] for sign in json.loads(overview)["signs"]}["Redis"] == "3 primaries answer"
    assert look(deployment, "/admin/", cookie)[0] == 200
    text = look(deployment, "/metrics")[1]
    assert "codeq_depths_complete 1.0" in text
    assert 'codeq_queue_depth{command="render",queue="ready"} 0.0' in text
    ran = {job.name: job for job in BeatJob.objects.all()}
    assert {"drain", "repair", "deliver"} <= ran.keys() <= PERIODIC_TASKS.keys()
    assert [(job.name, job.error) for job in ran.values() if job.failures] == []
    assert left(store, tenants) == []
    assert "CROSSSLOT" not in cluster.errors()


def move_under_load(deployment: Deployment, cluster: Cluster, tenants: Mapping[int, Tenant], stack: ExitStack) -> None:
    """The slot of one tenant, from node to node; nobody is refused and nothing is missing."""
    tenant = tenants[0]
    slot = slot_of(partition_of(tenant.tid, PARTITIONS))
    with Load(deployment.port, [tenant.producer] * 3, [tenant.worker] * 3) as load:
        until(lambda: len(load.done) > 20)
        for number in range(MOVES):
            cluster.move(slot, (cluster.owner(slot) + 1) % 3, pause=0.005)
            enough = len(load.done) + 20
            until(lambda enough=enough: len(load.done) > enough)
            if number % 2:
                cluster.move_whole(slot, (cluster.owner(slot) + 1) % 3)
    answers = Counter(each.status for each in load.heard)
    print(dict(answers), cluster.errors())
    assert answers.keys() <= {200, 202, 204}
    assert sorted(load.made) == sorted(load.done)
    assert cluster.errors()["TRYAGAIN"] > 0  # it did happen under load


@pytest.mark.timeout(300)
@pytest.mark.spec("ENQ-2", "A primary of a Redis Cluster dies: all other tenants go on, audited too, and it is said")
@pytest.mark.parametrize("ending", ["killed", "frozen"] if LONG else ["killed"])
def test_a_primary_that_dies_takes_only_its_tenants_with_it(
    deployment: Deployment, cluster: Cluster, store: Store, tenants: Mapping[int, Tenant], ending: str
) -> None:
    # The one that has every job's turn.
    dead = cluster.owner(slot_of(0))
    others = [tenant for tenant in tenants.values() if tenant.node != dead]
    cookie = console_cookie()
    with ExitStack() as stack:
        lost = Asker(deployment.port, tenants[dead], stack)
        kept = [lost.enqueue() for _ in range(5)]
        askers = [Asker(deployment.port, tenant, stack) for tenant in others]
        begun = [asker.enqueue() for asker in askers]
        until(lambda: BeatJob.objects.filter(name="drain").exists())
        frozen = freeze(cluster.servers[dead].pid) if ending == "frozen" else []
        if not frozen:
            cluster.servers[dead].kill()

        done = []
        for asker, task_id in zip(askers, begun, strict=True):
            # A claim that is lost with its process comes back to the queue at once, while the other node is away.
            done += [task_id, *(asker.enqueue() for _ in range(5))]
            for task in iter(asker.claim, None):
                asker.complete(task["id"])
        refused = lost.producer.ask("POST", TASKS, {"command": "render", "payload": {}})
        assert (refused[0], refused[1]["code"]) == (503, "unavailable")
        # Beat's jobs take their turn elsewhere, and go around what is away.
        until(lambda: {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} >= set(done))
        ready = json.loads(until(lambda: (said := look(deployment, "/readyz"))[0] == 503 and said[1]))
        assert ready["detail"] == f"redis: not serving: 127.0.0.1:{cluster.ports[dead]}"
        assert "codeq_depths_complete 0.0" in look(deployment, "/metrics")[1]
        status, overview = look(deployment, "/admin/console/overview.json", cookie)
        assert status == 200
        assert {row["tid"] for row in json.loads(overview)["rows"]} == {tenant.tid for tenant in others}
        signs = {sign["name"]: sign["says"] for sign in json.loads(overview)["signs"]}
        assert signs["Redis"] == f"no answer from 127.0.0.1:{cluster.ports[dead]}"

        thaw(frozen) if frozen else cluster.servers[dead].start()
        for task_id in kept:
            task = until(lambda: claimed_or_none(lost))
            assert task["id"] == task_id  # in order, and none missing
            lost.complete(task["id"])
        for task in iter(lost.claim, None):  # what was a 503 may have run: the frozen one reads it when it wakes up
            assert frozen
            kept.append(task["id"])
            lost.complete(task["id"])
        until(lambda: {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} >= {*kept, *done})
        until(lambda: look(deployment, "/readyz")[0] == 200)
        unanswered = [each for asker in askers for each in asker.heard if each.status not in (200, 202, 204)]
        assert unanswered == []
        # A request to the frozen one waits for five seconds.
        slowest = max(each.seconds for asker in askers for each in asker.heard)
        assert not frozen or slowest < 4.5, "somebody waited for the one away"
        assert Attempt.objects.count() == len(kept) + len(done)
        assert left(store, tenants) == []
        assert "CROSSSLOT" not in cluster.errors()

        # The process hears through one node. When that one dies, whoever waits is woken through another.
        (hears,) = [n for n, node in enumerate(cluster.nodes) if node.client_list(_type="pubsub")]
        cluster.servers[hears].kill()
        asker = Asker(deployment.port, next(tenant for tenant in tenants.values() if tenant.node != hears), stack)
        parked = stack.enter_context(ThreadPoolExecutor(1)).submit(asker.claim, 25)
        until(is_waited_for(store, asker.tenant))
        began, task_id = time.monotonic(), asker.enqueue()
        assert (parked.result() or {})["id"] == task_id
        assert time.monotonic() - began < 15


@pytest.mark.timeout(300)
@pytest.mark.spec(
    "ENQ-2", "A replica that takes over is found: at an operator's word nothing fails, after a death soon"
)
def test_a_replica_takes_over(
    deployment: Deployment, cluster: Cluster, tenants: Mapping[int, Tenant], tmp_path: Path
) -> None:
    copies = cluster.add_replicas(tmp_path / "cluster", appendfsync="always")
    tenant = tenants[0]
    with Load(deployment.port, [tenant.producer] * 3, [tenant.worker] * 3) as load:
        until(lambda: len(load.done) > 20)
        copies[0].execute_command("CLUSTER", "FAILOVER")
        until(lambda: copies[0].info("replication")["role"] == "master")
        enough = len(load.done) + 50
        until(lambda: len(load.done) > enough)
    assert Counter(each.status for each in load.heard).keys() <= {200, 202, 204}
    assert sorted(load.made) == sorted(load.done)

    # Now the new primary dies, and the old one, its replica, takes over by itself.
    for node in (*cluster.nodes, *copies):
        node.config_set("cluster-node-timeout", 2000)
    with Load(deployment.port, [tenant.producer] * 3, [tenant.worker] * 3) as load:
        until(lambda: len(load.done) > 20)
        died = time.monotonic()
        cluster.replicas[0].kill()
        until(lambda: cluster.nodes[0].info("replication")["role"] == "master")
        enough = len(load.done) + 50
        until(lambda: len(load.done) > enough)
        away = max(each.began for each in load.heard if each.status not in (200, 202, 204)) - died
    print(f"503 for {away:.1f} s", Counter(each.status for each in load.heard), len(load.made) - len(load.done))
    assert Counter(each.status for each in load.heard).keys() <= {200, 202, 204, 503, 409, 404}
    for copy in copies:
        copy.close()


def claimed_or_none(asker: Asker) -> dict[str, Any] | None:
    status, task = asker.worker.ask("POST", f"{TASKS}/claim", {"commands": ["render"], "leaseSeconds": 60})
    return task if status == 200 else None


@pytest.mark.spec("OBS-4", "Readiness looks at the settings of every primary, and names the one that is wrong")
def test_every_primary_has_to_be_durable(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(clusters.ClusterClient(cluster.servers[0].url)) as store:
        monkeypatch.setattr(readiness, "client", lambda: store)
        assert readiness.redis_is_missing() is None
        for number, node in enumerate(cluster.nodes):
            for name, bad, good, said in (
                ("appendfsync", "everysec", "always", "durability: appendfsync is not always"),
                ("maxmemory-policy", "allkeys-lru", "noeviction", "redis: maxmemory-policy is not noeviction"),
            ):
                node.config_set(name, bad)
                missing = readiness.redis_is_missing() or ""
                assert missing.startswith(said)
                assert missing.endswith(f"(127.0.0.1:{cluster.ports[number]})")
                node.config_set(name, good)


@pytest.mark.spec("QUE-5", "A process that is told the wrong thing about its servers does not start, and says so")
def test_a_wrong_word_about_a_cluster_is_refused(cluster: Cluster, valkey: Valkey, tmp_path: Path) -> None:
    node = cluster.servers[0].url
    with redis.Redis.from_url(node) as plain, pytest.raises(ConfigError, match="set CODEQ_REDIS_CLUSTER=true"):
        settle_partitions(plain)
    with (
        valkey_on_tcp(tmp_path) as single,
        closing(clusters.ClusterClient(single)) as clustered,
        pytest.raises(ConfigError, match="unset CODEQ_REDIS_CLUSTER"),
    ):
        settle_partitions(clustered)
    with pytest.raises(ConfigError, match="REDIS_URL names no node of a cluster"):
        clusters.ClusterClient(valkey.url)
    environment = {"REDIS_URL": node, "CODEQ_REDIS_CLUSTER": "true", "CELERY_BROKER_URL": node}
    with closing(Deployment(tmp_path, own_database(), **environment)) as deployment:
        assert deployment.worker().wait(60) != 0
        assert "CELERY_BROKER_URL names a node of a Redis Cluster" in deployment.log("worker").read_text()


@contextmanager
def valkey_on_tcp(tmp_path: Path) -> Iterator[str]:
    port = str(free_port())
    server = Valkey(tmp_path / "single", tmp_path / "single.txt", tmp_path / "s.sock", {**DURABLE, "port": port})
    server.start()
    try:
        yield server.url
    finally:
        server.kill()
