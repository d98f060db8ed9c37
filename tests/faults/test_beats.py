"""Two beats and two Celery workers, stopped, frozen past every lock and let go again: each effect happens once."""

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
from queues.domain import NewResult, NewTask, Status
from queues.models import Attempt, AuditedResult, BeatJob
from tenants.cache import tenant_cache
from tenants.models import Tenant as TenantRow
from tenants.tenant import Tenant
from tests.faults.deployment import Deployment, freeze, own_database, thaw
from tests.queues.engine.world import LONG
from tests.waiting import until
from tests.webhooks.receiver import OK, Receiver, Request, raw
from webhooks.models import Delivery, DeliveryAttempt, Subscription

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
PAST_THE_LOCKS_SECONDS = 12  # of drain, repair and deliver; that of notify is 30 s


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, own_database())
    yield deployment
    deployment.close()


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    TenantRow.objects.create(tid="acme0001", slug="acme")
    yield Tenant(tid="acme0001", slug="acme")
    tenant_cache.stop()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path != "/wake":
            await asyncio.sleep(0.3)  # so that some are on the wire when a worker freezes
        await raw(OK)(request, writer)

    receiver = Receiver(answer=answer).start()
    yield receiver
    receiver.stop()


class Work:
    """A bit of everything that beat has to do, again and again, and what must have come of it once."""

    def __init__(self, tenant: Tenant, receiver: Receiver) -> None:
        self.tenant, self.receiver = tenant, receiver
        self.expiring: list[str] = []
        self.told: list[str] = []
        self.woken: list[str] = []
        Subscription.objects.create(
            tenant_id=tenant.tid, worker="w", callback_url=receiver.url("/wake"), event_types=["*"], ttl_seconds=3600,
            min_interval_seconds=0, expires_at=datetime.now(UTC) + timedelta(hours=1),
        )  # fmt: skip

    def some(self) -> None:
        number = len(self.woken)
        # A lease that nobody renews: one attempt more, and nobody who would find that out but beat.
        command = f"expire-{number}"
        services.enqueue(self.tenant, [NewTask(command=command, payload="1", max_attempts=9)] * 5).run_sync()
        leased = services.claim(self.tenant, [command], "w", count=5, lease_seconds=1).run_sync().tasks
        self.expiring += [task.id for task in leased]
        # An ending with a webhook.
        hook = self.receiver.url(f"/told/{number}")
        services.enqueue(self.tenant, [NewTask(command="tell", payload="1", webhook=hook)] * 5).run_sync()
        tasks = services.claim(self.tenant, ["tell"], "w", count=5).run_sync().tasks
        results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"{}") for task in tasks]
        services.submit(self.tenant, "w", results).run_sync()
        self.told += [task.id for task in tasks]
        # A queue that becomes non-empty, once.
        command = f"wake-{number}"
        services.enqueue(self.tenant, [NewTask(command=command, payload="1")]).run_sync()
        self.woken.append(command)

    def keep_on(self, seconds: float) -> None:
        until_when = time.monotonic() + seconds
        while time.monotonic() < until_when:
            self.some()
            time.sleep(0.5)

    def is_done(self) -> bool:
        return (
            stream.lag() == 0
            and Attempt.objects.filter(command__startswith="expire").count() >= len(self.expiring)
            and Delivery.objects.filter(status="delivered").count() >= len(self.told)
            and len({body["eventType"] for body in self.wakes()} & set(self.woken)) == len(self.woken)
        )

    def wakes(self) -> list[dict[str, str]]:
        return [json.loads(request.body) for request in self.receiver.requests if request.path == "/wake"]


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "BEA-1", "Two beats, one stopped, one frozen, and a worker frozen past its locks: each effect once (B-8)"
)
def test_each_effect_happens_once_whatever_beats_and_workers_do(
    deployment: Deployment, tenant: Tenant, receiver: Receiver
) -> None:
    work = Work(tenant, receiver)
    first, second = deployment.beat(), deployment.beat()
    one, _ = deployment.worker(), deployment.worker()
    until(lambda: BeatJob.objects.count() >= 5, 60, every=0.1)

    work.keep_on(180 if LONG else 4)  # two of each
    stopped = freeze(one.pid)  # in the middle of whatever it does
    frozen_at = datetime.now(UTC)
    work.keep_on(PAST_THE_LOCKS_SECONDS)
    thawed_at = datetime.now(UTC)
    thaw(stopped)
    work.keep_on(2)
    first.terminate()
    first.wait(20)
    stopped = freeze(second.pid)
    work.keep_on(PAST_THE_LOCKS_SECONDS)
    assert not work.is_done()
    thaw(stopped)
    until(work.is_done, 60, every=0.1)

    attempts = Counter(Attempt.objects.filter(command__startswith="expire").values_list("task_id", "number", "outcome"))
    assert attempts == Counter((uuid.UUID(each), 1, "EXPIRED") for each in work.expiring)
    again = [selectors.task(tenant, each).run_sync().attempts for each in work.expiring[::10]]
    assert set(again) == {1}
    assert sorted(map(str, AuditedResult.objects.values_list("task_id", flat=True))) == sorted(work.told)
    posts = Counter(each.headers["webhook-id"] for each in receiver.requests if each.path.startswith("/told/"))
    assert len(posts) == len(work.told)
    notices = Counter(body["eventType"] for body in work.wakes() if body["eventType"] in work.woken)
    twice = [each for each, count in posts.items() if count > 1]
    print(f"{len(work.expiring)} leases, {len(posts)} callbacks, {len(twice)} twice, {len(notices)} notifications")
    # What was on the wire when the worker froze is the one thing that may come again, under the same id.
    for each in twice:
        *before, _ = DeliveryAttempt.objects.filter(delivery_id=each).order_by("number")
        assert len(before) == posts[each] - 1
        assert all(was_under_way(attempt, frozen_at, thawed_at) for attempt in before), each
    assert set(notices.values()) == {1}


def was_under_way(attempt: DeliveryAttempt, frozen_at: datetime, thawed_at: datetime) -> bool:
    """From before the worker froze until it was let go; its own clock begins a moment after `started_at`."""
    ended_at = attempt.started_at + timedelta(milliseconds=attempt.duration_ms)
    return attempt.started_at <= frozen_at and ended_at > thawed_at - timedelta(seconds=1)


@pytest.mark.real_time
@pytest.mark.spec("BEA-1", "A drain frozen in its transaction stops no other for long, and doubles nothing when let go")
def test_a_drain_frozen_in_the_middle_of_its_transaction_holds_nobody_up(
    deployment: Deployment, tenant: Tenant
) -> None:
    def end_some(count: int = 50) -> None:
        services.enqueue(tenant, [NewTask(command="render", payload="1")] * count).run_sync()
        tasks = services.claim(tenant, ["render"], "w", count=count).run_sync().tasks
        results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"{}") for task in tasks]
        services.submit(tenant, "w", results).run_sync()

    deployment.beat()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE queues_auditedresult IN SHARE MODE")
        end_some()
        frozen = deployment.worker()
        until(is_waiting_for_the_table, 60)
        stopped = freeze(frozen.pid)
    # Now its attempts are inserted, and its results too, and nobody commits them.
    began = time.monotonic()
    deployment.worker()
    until(lambda: AuditedResult.objects.count() == 50, 60, every=0.1)
    print("stored by the other worker after", round(time.monotonic() - began, 1), "s")

    thaw(stopped)
    end_some()
    until(lambda: AuditedResult.objects.count() == 100 and stream.lag() == 0, 60, every=0.1)
    assert Attempt.objects.count() == 100
    assert frozen.poll() is None


def is_waiting_for_the_table() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_locks WHERE relation = 'queues_auditedresult'::regclass AND NOT granted")
        return cursor.rowcount > 0


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("BEA-1", "Without a beat claims alone bring back what is due; a beat that returns catches up (B-7)")
def test_claims_alone_do_without_a_beat_and_a_beat_that_returns_catches_up(
    deployment: Deployment, tenant: Tenant
) -> None:
    count = 10_000 if LONG else 2_000

    def let_everything_fall_due(command: str) -> None:
        """Leases that run out, and tasks that become due."""
        for _ in range(count // 500):
            new = NewTask(command=command, payload="1", max_attempts=9)
            services.enqueue(tenant, [new] * 500).run_sync()
            assert len(services.claim(tenant, [command], "gone", count=500, lease_seconds=1).run_sync().tasks) == 500
        for _ in range(count // 500):
            services.enqueue(tenant, [NewTask(command=command, payload="1", delay_ms=1000)] * 500).run_sync()

    let_everything_fall_due("claimed")
    done = 0
    until_when = time.monotonic() + 60
    while done < 2 * count:
        assert time.monotonic() < until_when, done
        tasks = services.claim(tenant, ["claimed"], "w", count=100).run_sync().tasks
        results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"{}") for task in tasks]
        answers = services.submit(tenant, "w", results).run_sync()
        done += sum(not isinstance(each, Exception) for each in answers)
    assert (
        (stats := selectors.queue_stats(tenant, "claimed").run_sync()).ready == stats.delayed == stats.in_progress == 0
    )

    let_everything_fall_due("repaired")
    time.sleep(2)  # all is due, and nobody looks
    deployment.worker()
    beat = deployment.beat()

    def is_caught_up() -> bool:
        stats = selectors.queue_stats(tenant, "repaired").run_sync()
        return stats.ready == 2 * count and stream.lag() == 0

    began = time.monotonic()
    until(is_caught_up, 60, every=0.1)
    took = time.monotonic() - began
    assert Attempt.objects.filter(outcome="EXPIRED").count() == 2 * count

    # An hour away is one run, not sixty: so are eight seconds.
    until(lambda: BeatJob.objects.filter(name="repair").exists(), 60)
    stopped = freeze(beat.pid)
    runs = BeatJob.objects.get(name="repair").runs
    time.sleep(8)
    back = time.monotonic()
    thaw(stopped)
    time.sleep(3)
    more = BeatJob.objects.get(name="repair").runs - runs
    since = time.monotonic() - back
    print(
        f"{2 * count} due tasks ready {took:.1f} s after the start; {more} runs {since:.1f} s after 8 s without a beat"
    )
    assert more <= since + 3
