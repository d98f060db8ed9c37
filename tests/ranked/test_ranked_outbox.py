"""From a transaction into a ranked queue: nothing that was committed is forgotten, nothing else is enqueued."""

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
from queues.models import BeatJob
from queues.periodic import SKIPPED
from ranked import metrics as _ranked_metrics  # noqa: F401 - registers the gauge
from ranked import periodic_tasks, services
from ranked.models import RankedEntry
from ranked.services import Rank, RankedQueue
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from tests.concurrency.crowd import crowd
from tests.conftest import ValkeyFactory

pytestmark = pytest.mark.django_db(transaction=True)
HOWTO = Path(settings.BASE_DIR) / "docs" / "howto" / "ranked.md"


@pytest.fixture
def line(tenant: TenantSnapshot) -> RankedQueue:
    return RankedQueue(tenant, "reviews")


@pytest.fixture
def server(valkey_server: ValkeyFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valkey]:
    """A Valkey that may be stopped; ranked queues are on it."""
    server = valkey_server()
    with redis.Redis.from_url(server.url, socket_timeout=2) as there:
        monkeypatch.setattr(services, "engine", lambda: Engine(SyncRunner(there)))
        yield server


def names() -> list[str]:
    return list(Group.objects.order_by("pk").values_list("name", flat=True))


@pytest.mark.spec("RNK-1", "enqueue, dequeue, requeue_with_delay and release_lock: a task's way")
def test_a_tasks_way(line: RankedQueue, tenant: TenantSnapshot) -> None:
    line.enqueue(17)
    line.enqueue("a-pull-request", Rank.HIGH)
    assert not RankedEntry.objects.exists()
    other = RankedQueue(tenant, "reviews")
    assert line.dequeue() == "a-pull-request"
    assert other.dequeue() == "17"
    assert line.dequeue() is None
    assert line.requeue_with_delay("a-pull-request", 0)
    assert other.dequeue() == "a-pull-request"
    assert other.release_lock("a-pull-request")
    assert other.release_lock(17)
    assert line.dequeue() is None
    assert not client().keys("*ranked*")


@pytest.mark.spec("RNK-8", "Enqueued with the transaction: in line once it is committed, and never if it is not")
def test_what_is_rolled_back_was_never_enqueued(line: RankedQueue) -> None:
    with transaction.atomic():
        Group.objects.create(name="kept")
        line.enqueue("kept")
        assert line.dequeue() is None
    with transaction.atomic():
        line.enqueue("lost")
        transaction.set_rollback(True)
    assert periodic_tasks.sweep() == "0 enqueued"
    assert line.dequeue() == "kept"
    assert line.dequeue() is None


@pytest.mark.spec("RNK-8", "Redis stopped: the caller's rows are committed; Redis back: what was enqueued is in line")
def test_redis_away_and_back(server: Valkey, line: RankedQueue, caplog: pytest.LogCaptureFixture) -> None:
    line.enqueue("before")
    server.stop()
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            with transaction.atomic():
                Group.objects.create(name=f"review {n}")
                line.enqueue(f"t{n}", Rank.HIGH if n == 2 else Rank.NORMAL)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        assert names() == ["review 0", "review 1", "review 2"]
        with pytest.raises(errors.Unavailable):
            line.dequeue()
        assert periodic_tasks.sweep() == "ended early"
    assert RankedEntry.objects.count() == 3
    server.start()
    assert periodic_tasks.sweep() == "3 enqueued"
    assert not RankedEntry.objects.exists()
    assert [line.dequeue() for _ in range(5)] == ["t2", "before", "t0", "t1", None]
    assert periodic_tasks.sweep() == "0 enqueued"


@pytest.mark.spec("RNK-8", "A full Redis takes no entry, gives out what it has, and gets the rest when there is room")
def test_a_full_redis_is_an_outage_for_what_is_new_only(server: Valkey, line: RankedQueue) -> None:
    line.enqueue("t1")
    with redis.Redis.from_url(server.url) as there:
        there.config_set("maxmemory", "1")
        line.enqueue("t2")
        assert RankedEntry.objects.count() == 1
        assert line.dequeue() == "t1"
        assert line.requeue_with_delay("t1", 0)
        assert line.dequeue() == "t1"
        assert line.release_lock("t1")
        there.config_set("maxmemory", "0")
    assert periodic_tasks.sweep() == "1 enqueued"
    assert "codeq_ranked_waiting 0.0" in metrics.scrape().decode()
    assert line.dequeue() == "t2"


@pytest.mark.spec("RNK-8", "A process that dies between the commit and Redis has enqueued nevertheless")
def test_a_process_that_dies_after_its_commit(line: RankedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_hand_over_or_leave", lambda *_: None)
    for n in range(3):
        line.enqueue(f"t{n}")
    assert line.dequeue() is None
    assert periodic_tasks.sweep() == "3 enqueued"
    assert [line.dequeue() for _ in range(4)] == ["t0", "t1", "t2", None]
    assert BeatJob.objects.get(name="ranked").outcome == "3 enqueued"


def test_a_queue_that_redis_refuses_keeps_nobody_else_waiting(
    line: RankedQueue, tenant: TenantSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    """A key of another type, as a careless operator would leave one: not an outage, and it must not stop the rest."""
    name = keys.ranked(keys.of_partition(engine().partition_of(tenant.tid)).root, tenant.tid, "broken")
    client().set(name, "not a sorted set")
    with caplog.at_level(logging.ERROR):
        with transaction.atomic():
            Group.objects.create(name="kept")
            RankedQueue(tenant, "broken").enqueue("t1")
        assert names() == ["kept"]
        RankedEntry.objects.create(tenant_id=tenant.tid, queue="reviews", task_id="t2", rank=50)
        assert periodic_tasks.sweep() == "1 enqueued"
    assert "ranked queue broken of tenant acme0001" in caplog.text
    assert line.dequeue() == "t2"
    client().delete(name)
    assert periodic_tasks.sweep() == "1 enqueued"


@pytest.mark.spec("RNK-8", "Many hands at the same rows: each goes once")
def test_a_row_is_handed_over_by_one_of_many(line: RankedQueue, valkey: Valkey) -> None:
    rows = [RankedEntry(tenant_id=line.tid, queue=line.name, task_id=f"t{n}", rank=50) for n in range(50)]
    pks = [row.pk for row in RankedEntry.objects.bulk_create(rows)]

    def hand_over(_: object) -> int:
        try:
            return sum(services._hand_over(line.tid, line.name, [pk]) for pk in pks) + services.sweep(lambda: True)
        finally:
            connection.close()

    assert sum(crowd(valkey.url, [hand_over] * 8)) == 50
    assert {line.dequeue() for _ in range(50)} == {f"t{n}" for n in range(50)}
    assert line.dequeue() is None
    assert not RankedEntry.objects.exists()


def test_a_sweep_stops_when_its_turn_is_over(line: RankedQueue) -> None:
    RankedEntry.objects.create(tenant_id=line.tid, queue=line.name, task_id="t1", rank=50)
    turn = PeriodicTaskLock.acquire("queues.ranked", 15)
    assert turn
    assert periodic_tasks.sweep() == SKIPPED
    turn.release()
    assert services.sweep(lambda: False) == 0
    assert "codeq_ranked_waiting 1.0" in metrics.scrape().decode()
    assert periodic_tasks.sweep() == "1 enqueued"


@pytest.mark.spec("DOC-2", "The how-to's worker for code reviews runs as it is written")
def test_the_howto_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
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
        """What stands for the reader's own model."""

        def __init__(self, **fields: Any) -> None:
            self.pk = Group.objects.create(name=f"{fields['commit']}").pk

    Review.objects = type("Rows", (), {"create": Review})  # type: ignore[attr-defined]
    names: dict[str, Any] = {"Review": Review, "review": review}
    try:
        for block in blocks:
            exec(block, names)
        create: Callable[..., Any] = names["request_review"]
        pushed, asked = create("c1", is_pull_request=False), create("c2", is_pull_request=True)
        queue = names["queue"]
        names["work_once"](queue)
        assert reviewed == [f"{asked.pk}"]
        names["work_once"](queue)
        assert reviewed == [f"{asked.pk}", f"{pushed.pk}"]
        assert (queue.queue_size(), queue.is_locked(asked.pk)) == (1, False)
        assert not names["work_once"](queue)
    finally:
        tenant_cache.stop()


def test_the_former_import_path_works_with_a_warning() -> None:
    import queues.ranked

    with pytest.warns(DeprecationWarning, match=r"import from ranked\.services"):
        assert queues.ranked.RankedQueue is services.RankedQueue
