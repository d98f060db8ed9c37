"""Ranked queues and transactions: the outbox table from which entries move to Redis.

A task is enqueued if its transaction commits, and not otherwise.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.contrib.auth.models import Group
from django.db import connection, transaction

from codeq_site.devserver.embedded import Valkey
from core import errors, metrics
from core.periodic_lock import PeriodicTaskLock
from core.redis.connections import client
from core.redis.runners import SyncRunner
from queues.current_engine import engine
from queues.engine import Engine, keys
from queues.models import PeriodicTaskRun
from queues.periodic import SKIPPED
from ranked import metrics as _ranked_metrics  # noqa: F401 - registers the gauge
from ranked import periodic_tasks, services
from ranked.models import RankedEntry
from ranked.services import Rank, RankedQueue
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from tests.concurrency.threads import run_together
from tests.conftest import ValkeyFactory
from tests.factories import RankedEntryFactory

pytestmark = pytest.mark.django_db(transaction=True)
HOWTO = Path(settings.BASE_DIR) / "docs" / "howto" / "ranked.md"


@pytest.fixture
def queue(tenant: TenantSnapshot) -> RankedQueue:
    return RankedQueue(tenant, "reviews")


@pytest.fixture
def server(valkey_server: ValkeyFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valkey]:
    """The Valkey of the ranked queues, which a test can stop."""
    server = valkey_server()
    with redis.Redis.from_url(server.url, socket_timeout=2) as store:
        monkeypatch.setattr(services, "engine", lambda: Engine(SyncRunner(store)))
        yield server


def list_group_names() -> list[str]:
    return list(Group.objects.order_by("pk").values_list("name", flat=True))


@pytest.mark.spec("RNK-1", "A task is enqueued, dequeued, requeued with a delay, and released")
def test_life_cycle_of_a_task(queue: RankedQueue, tenant: TenantSnapshot) -> None:
    queue.enqueue(17)
    queue.enqueue("a-pull-request", Rank.HIGH)
    assert not RankedEntry.objects.exists()
    other = RankedQueue(tenant, "reviews")
    assert queue.dequeue() == "a-pull-request"
    assert other.dequeue() == "17"
    assert queue.dequeue() is None
    assert queue.requeue_with_delay("a-pull-request", 0)
    assert other.dequeue() == "a-pull-request"
    assert other.finish("a-pull-request")
    assert other.finish(17)
    assert queue.dequeue() is None
    assert not client().keys("*ranked*")


@pytest.mark.spec("RNK-8", "A task is enqueued when the transaction commits, and not at all if it rolls back")
def test_task_of_a_rolled_back_transaction_is_not_enqueued(queue: RankedQueue) -> None:
    with transaction.atomic():
        Group.objects.create(name="kept")
        queue.enqueue("kept")
        assert queue.dequeue() is None
    with transaction.atomic():
        queue.enqueue("lost")
        transaction.set_rollback(True)
    assert periodic_tasks.sweep() == "0 enqueued"
    assert queue.dequeue() == "kept"
    assert queue.dequeue() is None


@pytest.mark.spec(
    "RNK-8", "Without Redis, the caller's transactions commit; when Redis is back, their tasks are enqueued"
)
def test_tasks_are_enqueued_when_redis_is_back(
    server: Valkey, queue: RankedQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.enqueue("before")
    server.stop()
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            with transaction.atomic():
                Group.objects.create(name=f"review {n}")
                queue.enqueue(f"t{n}", Rank.HIGH if n == 2 else Rank.NORMAL)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        assert list_group_names() == ["review 0", "review 1", "review 2"]
        with pytest.raises(errors.Unavailable):
            queue.dequeue()
        assert periodic_tasks.sweep() == "ended early"
    assert RankedEntry.objects.count() == 3
    server.start()
    assert periodic_tasks.sweep() == "3 enqueued"
    assert not RankedEntry.objects.exists()
    assert [queue.dequeue() for _ in range(5)] == ["t2", "before", "t0", "t1", None]
    assert periodic_tasks.sweep() == "0 enqueued"


@pytest.mark.spec("RNK-8", "A full Redis stores no new entry and still serves others; later it gets the rest")
def test_full_redis_still_serves_the_entries_it_has(server: Valkey, queue: RankedQueue) -> None:
    queue.enqueue("t1")
    with redis.Redis.from_url(server.url) as store:
        store.config_set("maxmemory", "1")
        queue.enqueue("t2")
        assert RankedEntry.objects.count() == 1
        assert queue.dequeue() == "t1"
        assert queue.requeue_with_delay("t1", 0)
        assert queue.dequeue() == "t1"
        assert queue.finish("t1")
        store.config_set("maxmemory", "0")
    assert periodic_tasks.sweep() == "1 enqueued"
    assert "codeq_ranked_waiting 0.0" in metrics.scrape().decode()
    assert queue.dequeue() == "t2"


@pytest.mark.spec("RNK-8", "A task is enqueued even if the process dies between the commit and the call to Redis")
def test_task_of_a_process_that_dies_after_its_commit_is_enqueued(
    queue: RankedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_try_to_move_to_redis", lambda *_: None)
    for n in range(3):
        queue.enqueue(f"t{n}")
    assert queue.dequeue() is None
    assert periodic_tasks.sweep() == "3 enqueued"
    assert [queue.dequeue() for _ in range(4)] == ["t0", "t1", "t2", None]
    assert PeriodicTaskRun.objects.get(name="ranked").outcome == "3 enqueued"


def test_queue_that_redis_refuses_does_not_delay_others(
    queue: RankedQueue, tenant: TenantSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    """The key of a queue has another type, for example after a mistake of an operator."""
    name = keys.ranked(keys.of_partition(engine().partition_of(tenant.tid)).root, tenant.tid, "broken")
    client().set(name, "not a sorted set")
    with caplog.at_level(logging.ERROR):
        with transaction.atomic():
            Group.objects.create(name="kept")
            RankedQueue(tenant, "broken").enqueue("t1")
        assert list_group_names() == ["kept"]
        RankedEntryFactory(tenant_id=tenant.tid, task_id="t2")
        assert periodic_tasks.sweep() == "1 enqueued"
    assert "ranked queue broken of tenant acme0001" in caplog.text
    assert queue.dequeue() == "t2"
    client().delete(name)
    assert periodic_tasks.sweep() == "1 enqueued"


@pytest.mark.spec("RNK-8", "Concurrent processes move each row once")
def test_concurrent_processes_move_each_row_once(queue: RankedQueue, valkey: Valkey) -> None:
    rows = RankedEntryFactory.create_batch(50, tenant_id=queue.tid, queue=queue.name)
    pks = [row.pk for row in rows]

    def move_all(_: object) -> int:
        try:
            return sum(services._move_to_redis(queue.tid, queue.name, [pk]) for pk in pks) + services.sweep(
                lambda: True
            )
        finally:
            connection.close()

    assert sum(run_together(valkey.url, [move_all] * 8)) == 50
    assert {queue.dequeue() for _ in range(50)} == {row.task_id for row in rows}
    assert queue.dequeue() is None
    assert not RankedEntry.objects.exists()


def test_sweep_needs_the_lock_and_stops_when_it_loses_it(queue: RankedQueue) -> None:
    RankedEntryFactory(tenant_id=queue.tid, queue=queue.name, task_id="t1")
    lock = PeriodicTaskLock.acquire("queues.ranked", 15)
    assert lock
    assert periodic_tasks.sweep() == SKIPPED
    lock.release()
    assert services.sweep(lambda: False) == 0
    assert "codeq_ranked_waiting 1.0" in metrics.scrape().decode()
    assert periodic_tasks.sweep() == "1 enqueued"


@pytest.mark.spec("DOC-2", "The code of the how-to for ranked queues runs as printed")
def test_code_of_the_howto_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenants.services import create_tenant

    create_tenant("acme")
    blocks = re.findall(r"^```python\n(.*?)^```", HOWTO.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 3
    reviewed: list[str] = []

    def review(task_id: str) -> None:
        reviewed.append(task_id)
        if reviewed.count(task_id) == 1 and len(reviewed) == 1:
            raise ConnectionError

    class Review:
        """Replaces a model that the reader of the guide has."""

        def __init__(self, **fields: Any) -> None:
            self.pk = Group.objects.create(name=f"{fields['commit']}").pk

    Review.objects = type("Rows", (), {"create": Review})  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {"Review": Review, "review": review}
    try:
        for block in blocks:
            exec(block, namespace)
        create: Callable[..., Any] = namespace["request_review"]
        push, pull_request = create("c1", is_pull_request=False), create("c2", is_pull_request=True)
        queue = namespace["queue"]
        namespace["work_once"](queue)
        assert reviewed == [f"{pull_request.pk}"]
        namespace["work_once"](queue)
        assert reviewed == [f"{pull_request.pk}", f"{push.pk}"]
        assert (queue.queue_size(), queue.is_locked(pull_request.pk)) == (1, False)
        assert not namespace["work_once"](queue)
    finally:
        tenant_cache.stop()


@pytest.mark.spec("RNK-6", "`release_lock`, the former name of `finish`, works with a warning")
@pytest.mark.django_db(transaction=True)
def test_former_name_of_finish_works_with_a_warning(queue: RankedQueue) -> None:
    queue.enqueue("t1")
    assert queue.dequeue() == "t1"
    with pytest.warns(DeprecationWarning, match="call finish"):
        assert queue.release_lock("t1")
    assert not queue.is_locked("t1")
    assert queue.queue_size() == 0


def test_former_import_path_works_with_a_warning() -> None:
    import queues.ranked

    with pytest.warns(DeprecationWarning, match=r"import from ranked\.services"):
        assert queues.ranked.RankedQueue is services.RankedQueue
