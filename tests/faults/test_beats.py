"""Stop, freeze and resume beats and Celery workers: each effect happens once."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.db import connection, transaction

from queues import selectors, services
from queues.audit import stream
from queues.domain import NewResult, NewTask, TaskStatus
from queues.models import Attempt, AuditedResult, PeriodicTaskRun
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from tests.factories import SubscriptionFactory, TenantFactory
from tests.faults.deployment import Deployment, freeze, get_database_url, thaw
from tests.queues.engine.checked_engine import LONG
from tests.waiting import until
from tests.webhooks.receiver import OK, Receiver, Request, raw
from webhooks.models import Delivery, DeliveryAttempt

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
PAST_LOCKS_SECONDS = 12  # longer than the locks of drain, repair and deliver; that of notify lasts 30 s


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, get_database_url())
    yield deployment
    deployment.close()


@pytest.fixture
def tenant() -> Iterator[TenantSnapshot]:
    TenantFactory(tid="acme0001", slug="acme")
    yield TenantSnapshot(tid="acme0001", slug="acme")
    tenant_cache.stop()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path != "/wake":
            await asyncio.sleep(0.3)  # so that some requests are in flight when a worker freezes
        await raw(OK)(request, writer)

    receiver = Receiver(answer=answer).start()
    yield receiver
    receiver.stop()


class PeriodicWork:
    """Create work for every periodic task, and record the effects that must happen once."""

    def __init__(self, tenant: TenantSnapshot, receiver: Receiver) -> None:
        self.tenant, self.receiver = tenant, receiver
        self.expiring: list[str] = []
        self.completed: list[str] = []
        self.woken_commands: list[str] = []
        SubscriptionFactory(tenant_id=tenant.tid, callback_url=receiver.url("/wake"))

    def create_batch(self) -> None:
        number = len(self.woken_commands)
        # Leases that expire: only beat detects them, and adds one attempt.
        command = f"expire-{number}"
        services.enqueue(self.tenant, [NewTask(command=command, payload="1", max_attempts=9)] * 5).run_sync()
        leased = services.claim(self.tenant, [command], "w", count=5, lease_seconds=1).run_sync().tasks
        self.expiring += [task.id for task in leased]
        # Completed tasks with a webhook.
        hook = self.receiver.url(f"/callback/{number}")
        services.enqueue(self.tenant, [NewTask(command="tell", payload="1", webhook=hook)] * 5).run_sync()
        tasks = services.claim(self.tenant, ["tell"], "w", count=5).run_sync().tasks
        results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"{}") for task in tasks]
        services.submit(self.tenant, "w", results).run_sync()
        self.completed += [task.id for task in tasks]
        # A queue that becomes non-empty once.
        command = f"wake-{number}"
        services.enqueue(self.tenant, [NewTask(command=command, payload="1")]).run_sync()
        self.woken_commands.append(command)

    def create_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.create_batch()
            time.sleep(0.5)

    def is_done(self) -> bool:
        return (
            stream.lag() == 0
            and Attempt.objects.filter(command__startswith="expire").count() >= len(self.expiring)
            and Delivery.objects.filter(status="delivered").count() >= len(self.completed)
            and len({body["eventType"] for body in self.list_notifications()} & set(self.woken_commands))
            == len(self.woken_commands)
        )

    def list_notifications(self) -> list[dict[str, str]]:
        return [json.loads(request.body) for request in self.receiver.requests if request.path == "/wake"]


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "BEA-1", "Two beats, one stopped and one frozen, and a worker frozen past its locks: each effect happens once"
)
def test_each_effect_happens_once_with_stopped_and_frozen_beats_and_workers(
    deployment: Deployment, tenant: TenantSnapshot, receiver: Receiver
) -> None:
    work = PeriodicWork(tenant, receiver)
    first, second = deployment.beat(), deployment.beat()
    worker, _ = deployment.worker(), deployment.worker()
    until(lambda: PeriodicTaskRun.objects.count() >= 5, 60, every=0.1)

    work.create_for(180 if LONG else 4)  # two beats and two workers
    stopped = freeze(worker.pid)  # at an arbitrary point of its work
    frozen_at = datetime.now(UTC)
    work.create_for(PAST_LOCKS_SECONDS)
    thawed_at = datetime.now(UTC)
    thaw(stopped)
    work.create_for(2)
    first.terminate()
    first.wait(20)
    stopped = freeze(second.pid)
    work.create_for(PAST_LOCKS_SECONDS)
    assert not work.is_done()
    thaw(stopped)
    until(work.is_done, 60, every=0.1)

    attempts = Counter(Attempt.objects.filter(command__startswith="expire").values_list("task_id", "number", "outcome"))
    assert attempts == Counter((uuid.UUID(task_id), 1, "EXPIRED") for task_id in work.expiring)
    attempt_counts = {selectors.task(tenant, task_id).run_sync().attempts for task_id in work.expiring[::10]}
    assert attempt_counts == {1}
    assert sorted(map(str, AuditedResult.objects.values_list("task_id", flat=True))) == sorted(work.completed)
    posts = Counter(
        request.headers["webhook-id"] for request in receiver.requests if request.path.startswith("/callback/")
    )
    assert len(posts) == len(work.completed)
    notices = Counter(
        body["eventType"] for body in work.list_notifications() if body["eventType"] in work.woken_commands
    )
    repeated = [delivery_id for delivery_id, count in posts.items() if count > 1]
    print(
        f"{len(work.expiring)} leases, {len(posts)} callbacks, {len(repeated)} repeated, {len(notices)} notifications"
    )
    # Only requests that were in flight when the worker froze may be repeated, with the same id.
    for delivery_id in repeated:
        *before, _ = DeliveryAttempt.objects.filter(delivery_id=delivery_id).order_by("number")
        assert len(before) == posts[delivery_id] - 1
        assert all(was_under_way(attempt, frozen_at, thawed_at) for attempt in before), delivery_id
    assert set(notices.values()) == {1}


def was_under_way(attempt: DeliveryAttempt, frozen_at: datetime, thawed_at: datetime) -> bool:
    """Return whether the attempt was in flight while the worker was frozen.

    Its duration is measured from shortly after `started_at`.
    """
    ended_at = attempt.started_at + timedelta(milliseconds=attempt.duration_ms)
    return attempt.started_at <= frozen_at and ended_at > thawed_at - timedelta(seconds=1)


@pytest.mark.real_time
@pytest.mark.spec(
    "BEA-1", "A drain frozen in its transaction does not block others for long, and duplicates nothing when resumed"
)
def test_drain_frozen_in_its_transaction_does_not_block_others(deployment: Deployment, tenant: TenantSnapshot) -> None:
    def complete_some(count: int = 50) -> None:
        services.enqueue(tenant, [NewTask(command="render", payload="1")] * count).run_sync()
        tasks = services.claim(tenant, ["render"], "w", count=count).run_sync().tasks
        results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"{}") for task in tasks]
        services.submit(tenant, "w", results).run_sync()

    deployment.beat()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE queues_auditedresult IN SHARE MODE")
        complete_some()
        frozen = deployment.worker()
        until(is_waiting_for_table, 60)
        stopped = freeze(frozen.pid)
    # Its attempts and results are inserted now, but not committed.
    started = time.monotonic()
    deployment.worker()
    until(lambda: AuditedResult.objects.count() == 50, 60, every=0.1)
    print("stored by the other worker after", round(time.monotonic() - started, 1), "s")

    thaw(stopped)
    complete_some()
    until(lambda: AuditedResult.objects.count() == 100 and stream.lag() == 0, 60, every=0.1)
    assert Attempt.objects.count() == 100
    assert frozen.poll() is None


def is_waiting_for_table() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_locks WHERE relation = 'queues_auditedresult'::regclass AND NOT granted")
        return cursor.rowcount > 0


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("BEA-1", "Without beat, claims alone make due tasks available; a beat that returns catches up")
def test_claims_work_without_beat_and_a_returning_beat_catches_up(
    deployment: Deployment, tenant: TenantSnapshot
) -> None:
    count = 10_000 if LONG else 2_000

    def create_due_tasks(command: str) -> None:
        """Create leases that expire, and tasks that become due."""
        for _ in range(count // 500):
            new = NewTask(command=command, payload="1", max_attempts=9)
            services.enqueue(tenant, [new] * 500).run_sync()
            assert len(services.claim(tenant, [command], "lost", count=500, lease_seconds=1).run_sync().tasks) == 500
        for _ in range(count // 500):
            services.enqueue(tenant, [NewTask(command=command, payload="1", delay_ms=1000)] * 500).run_sync()

    create_due_tasks("claimed")
    done = 0
    deadline = time.monotonic() + 60
    while done < 2 * count:
        assert time.monotonic() < deadline, done
        tasks = services.claim(tenant, ["claimed"], "w", count=100).run_sync().tasks
        results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"{}") for task in tasks]
        items = services.submit(tenant, "w", results).run_sync()
        done += sum(not isinstance(item, Exception) for item in items)
    assert (
        (stats := selectors.queue_stats(tenant, "claimed").run_sync()).ready == stats.delayed == stats.in_progress == 0
    )

    create_due_tasks("repaired")
    time.sleep(2)  # everything is due, and no process is running
    deployment.worker()
    beat = deployment.beat()

    def is_caught_up() -> bool:
        stats = selectors.queue_stats(tenant, "repaired").run_sync()
        return stats.ready == 2 * count and stream.lag() == 0

    started = time.monotonic()
    until(is_caught_up, 60, every=0.1)
    seconds = time.monotonic() - started
    assert Attempt.objects.filter(outcome="EXPIRED").count() == 2 * count

    # After a pause, a periodic task runs once, not once for each missed interval.
    until(lambda: PeriodicTaskRun.objects.filter(name="repair").exists(), 60)
    stopped = freeze(beat.pid)
    runs = PeriodicTaskRun.objects.get(name="repair").runs
    time.sleep(8)
    resumed_at = time.monotonic()
    thaw(stopped)
    time.sleep(3)
    new_runs = PeriodicTaskRun.objects.get(name="repair").runs - runs
    elapsed = time.monotonic() - resumed_at
    print(
        f"{2 * count} due tasks ready {seconds:.1f} s after the start; "
        f"{new_runs} runs {elapsed:.1f} s after 8 s without a beat"
    )
    assert new_runs <= elapsed + 3
