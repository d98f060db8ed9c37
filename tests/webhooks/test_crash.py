"""Kill real Celery workers at any time: every callback arrives, and few arrive twice."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.conf import conf
from queues import services
from queues.audit import stream
from queues.domain import NewResult, NewTask, TaskStatus
from queues.models import AuditedResult
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tests.faults.deployment import Deployment, get_database_url, kill
from tests.queues.engine.checked_engine import LONG
from tests.waiting import until
from tests.webhooks.conftest import MakeDelivery, MakeReceiver
from tests.webhooks.receiver import OK, Receiver, Request, hang, in_turn, raw, status
from webhooks.models import Delivery, DeliveryAttempt

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, get_database_url())
    yield deployment
    deployment.close()


@pytest.mark.real_time
@pytest.mark.spec("WHK-3", "A worker killed during a POST: delivered within 60 s, same id, at most one duplicate")
def test_worker_killed_during_a_post_loses_no_delivery(
    receiver: Receiver, make_delivery: MakeDelivery, deployment: Deployment
) -> None:
    receiver.answer = in_turn(hang, raw(OK))
    row = make_delivery(receiver.url())
    deployment.beat()
    worker = deployment.worker()
    until(lambda: receiver.requests, 30)
    kill(worker)
    killed_at = time.monotonic()
    deployment.worker()
    until(lambda: Delivery.objects.get().status == "delivered", 60, every=0.1)
    print("delivered", round(time.monotonic() - killed_at, 1), "s after the kill")
    assert {request.headers["webhook-id"] for request in receiver.requests} == {str(row.pk)}
    assert len(receiver.requests) == 2
    assert DeliveryAttempt.objects.count() == 1


def end_tasks(tenant: TenantSnapshot, hooks: list[str]) -> set[str]:
    """Enqueue and complete a task for each webhook; return the task ids."""
    task_ids: set[str] = set()
    for start in range(0, len(hooks), 500):
        new = [NewTask(command="render", payload="1", webhook=hook) for hook in hooks[start : start + 500]]
        services.enqueue(tenant, new).run_sync()
        tasks = services.claim(tenant, ["render"], "w", count=len(new)).run_sync().tasks
        results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"{}") for task in tasks]
        answers = services.submit(tenant, "w", results).run_sync()
        assert not [answer for answer in answers if isinstance(answer, Exception)]
        task_ids |= {task.id for task in tasks}
    return task_ids


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "WHK-3",
    "Workers killed at random, every fifth response a failure: all delivered, at most 1% twice",
)
def test_killed_workers_lose_no_delivery(
    loopback: None, make_receiver: MakeReceiver, acme: Tenant, tmp_path: Path
) -> None:
    count, kills = (10_000, 10) if LONG else (1_000, 4)
    rng = random.Random(20261118)
    accepted: Counter[str] = Counter()  # delivery id -> responses with status 200
    unrecorded: dict[str, int] = {}  # of these, responses that were not recorded because of a kill
    failed = answered = 0

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal failed, answered
        await asyncio.sleep(rng.uniform(0, 0.02))
        try:
            if rng.random() < 0.2:
                failed += 1
                await status(500)(request, writer)
            else:
                accepted[request.headers["webhook-id"]] += 1
                await raw(OK)(request, writer)
        finally:
            answered += 1

    receiver = make_receiver(host="0.0.0.0", answer=answer)
    hooks = [receiver.url(f"/{number}", host=f"127.0.0.{2 + number % 10}") for number in range(count)]
    task_ids = end_tasks(TenantSnapshot(tid=acme.tid, slug=acme.slug), hooks)
    assert len(task_ids) == count

    settings = {"QUICK_ATTEMPTS": "15", "RETRY_BASE_SECONDS": "0.5", "RETRY_CAP_SECONDS": "2", "DEADLINE_SECONDS": "3"}

    def count_unrecorded() -> None:
        """Count the responses that are not recorded, while no sender runs that could record them."""
        last_count, quiet_checks = -1, 0

        def is_quiet() -> bool:
            """Whether all requests on the wire have arrived and are answered."""
            nonlocal last_count, quiet_checks
            quiet_checks = quiet_checks + 1 if len(receiver.requests) == last_count == answered else 0
            last_count = len(receiver.requests)
            return quiet_checks == 10

        until(is_quiet, every=0.02)
        delivered = Delivery.objects.filter(status="delivered").values_list("pk", flat=True)
        for delivery_id in accepted.keys() - set(map(str, delivered)):
            unrecorded[delivery_id] = accepted[delivery_id]

    deployment = Deployment(
        tmp_path, get_database_url(), **{f"CODEQ_WEBHOOKS_{name}": value for name, value in settings.items()}
    )
    try:
        deployment.beat()
        started = time.monotonic()
        for number in range(kills):
            worker = deployment.worker()
            # Kill some workers during the drain, and some with few deliveries left.
            goal = count * (number + rng.random()) / kills if number else 0
            until(lambda goal=goal: len(accepted) >= goal and AuditedResult.objects.exists(), 120, every=0.02)
            time.sleep(rng.uniform(0, 0.3))
            kill(worker)
            count_unrecorded()
        deployment.worker()
        until(lambda: stream.lag() == 0, 60, every=0.2)
        until(lambda: not Delivery.objects.exclude(status="delivered").exists(), 120, every=0.2)
    finally:
        deployment.close()
    seconds = time.monotonic() - started
    repeats = accepted.total() - len(accepted)
    print(f"{len(accepted)} of {count} in {seconds:.0f} s, {failed} failures, {kills} kills, {repeats} repeated")
    assert {str(task_id) for task_id in Delivery.objects.values_list("task_id", flat=True)} == task_ids
    assert set(accepted) == {str(pk) for pk in Delivery.objects.values_list("pk", flat=True)}
    assert len(accepted) == count
    assert {pk: count for pk, count in accepted.items() if count - unrecorded.get(pk, 0) > 1} == {}
    assert repeats <= (count // 100 if LONG else kills * 4 * conf().webhooks.max_unrecorded)


@pytest.mark.real_time
@pytest.mark.spec("WHK-3", "A hanging endpoint delays no other: with real workers the p99 wait is at most 10 s")
def test_hanging_endpoint_delays_no_other_in_a_deployment(
    loopback: None, make_receiver: MakeReceiver, make_delivery: MakeDelivery, deployment: Deployment
) -> None:
    hanging, healthy = make_receiver(answer=hang), make_receiver(host="127.0.0.2")
    deployment.beat()
    deployment.worker()
    for _ in range(300):
        make_delivery(hanging.url(), due_at=datetime.now(UTC) - timedelta(seconds=60))
    until(lambda: len(hanging.requests) >= conf().webhooks.slots_per_host, 30)
    due_at = datetime.now(UTC)
    for _ in range(300):
        make_delivery(healthy.url(), due_at=due_at)
    until(lambda: len(healthy.requests) == 300, 30)
    until(lambda: DeliveryAttempt.objects.filter(status_code=200).count() == 300)
    waits = sorted(
        (started_at - due_at).total_seconds()
        for started_at in DeliveryAttempt.objects.filter(status_code=200).values_list("started_at", flat=True)
    )
    print("p99 wait", round(waits[-3], 2), "s")
    assert waits[-3] <= 10
