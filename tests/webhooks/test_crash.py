"""Real beats and Celery workers, killed at any moment: every callback arrives, under its own id, hardly one twice."""

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
from queues.domain import NewResult, NewTask, Status
from queues.models import AuditedResult
from tenants.models import Tenant as TenantRow
from tenants.tenant import Tenant
from tests.faults.deployment import Deployment, kill, own_database
from tests.queues.engine.world import LONG
from tests.waiting import until
from tests.webhooks.conftest import MakeDelivery, MakeReceiver
from tests.webhooks.receiver import OK, Receiver, Request, hang, in_turn, raw, status
from webhooks.models import Delivery, DeliveryAttempt

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, own_database())
    yield deployment
    deployment.close()


@pytest.mark.real_time
@pytest.mark.spec("WHK-3", "A worker killed in mid-POST: delivered within 60 s, same id, one duplicate at most (B-6)")
def test_a_worker_killed_in_the_middle_of_a_post_loses_nothing(
    receiver: Receiver, make_delivery: MakeDelivery, deployment: Deployment
) -> None:
    receiver.answer = in_turn(hang, raw(OK))
    row = make_delivery(receiver.url())
    deployment.beat()
    worker = deployment.worker()
    until(lambda: receiver.requests, 30)
    kill(worker)
    killed = time.monotonic()
    deployment.worker()
    until(lambda: Delivery.objects.get().status == "delivered", 60, every=0.1)
    print("delivered", round(time.monotonic() - killed, 1), "s after the kill")
    assert {request.headers["webhook-id"] for request in receiver.requests} == {str(row.pk)}
    assert len(receiver.requests) == 2
    assert DeliveryAttempt.objects.count() == 1


def end_tasks(tenant: Tenant, hooks: list[str]) -> set[str]:
    """Tasks that a worker has completed, one for each of these webhooks."""
    made: set[str] = set()
    for at in range(0, len(hooks), 500):
        new = [NewTask(command="render", payload="1", webhook=hook) for hook in hooks[at : at + 500]]
        services.enqueue(tenant, new).run_sync()
        tasks = services.claim(tenant, ["render"], "w", count=len(new)).run_sync().tasks
        results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"{}") for task in tasks]
        assert not [each for each in services.submit(tenant, "w", results).run_sync() if isinstance(each, Exception)]
        made |= {task.id for task in tasks}
    return made


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "WHK-3",
    "Workers killed at random, one answer in five a failure: all told, one in a hundred twice at most (W-2)",
)
def test_every_ending_is_told_whoever_dies(
    loopback: None, make_receiver: MakeReceiver, acme: TenantRow, tmp_path: Path
) -> None:
    count, kills = (10_000, 10) if LONG else (1_000, 4)
    dice = random.Random(20261118)
    taken: Counter[str] = Counter()  # how often an event was answered with 200
    lost: dict[str, int] = {}  # how many of these answers a kill kept from being recorded
    failed = over = 0

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal failed, over
        await asyncio.sleep(dice.uniform(0, 0.02))
        try:
            if dice.random() < 0.2:
                failed += 1
                await status(500)(request, writer)
            else:
                taken[request.headers["webhook-id"]] += 1
                await raw(OK)(request, writer)
        finally:
            over += 1

    receiver = make_receiver(host="0.0.0.0", answer=answer)
    hooks = [receiver.url(f"/{number}", host=f"127.0.0.{2 + number % 10}") for number in range(count)]
    made = end_tasks(Tenant(tid=acme.tid, slug=acme.slug), hooks)
    assert len(made) == count

    quick = {"TRIES": "15", "RETRY_BASE_SECONDS": "0.5", "RETRY_CAP_SECONDS": "2", "DEADLINE_SECONDS": "3"}

    def note_what_is_lost() -> None:
        """After a kill: nobody sends, so what is answered by now and not on record never will be."""
        seen, quiet = -1, 0

        def is_quiet() -> bool:
            """All that was on the wire has come in, and is answered."""
            nonlocal seen, quiet
            quiet = quiet + 1 if len(receiver.requests) == seen == over else 0
            seen = len(receiver.requests)
            return quiet == 10

        until(is_quiet, every=0.02)
        delivered = Delivery.objects.filter(status="delivered").values_list("pk", flat=True)
        for each in taken.keys() - set(map(str, delivered)):
            lost[each] = taken[each]

    deployment = Deployment(
        tmp_path, own_database(), **{f"CODEQ_WEBHOOKS_{name}": value for name, value in quick.items()}
    )
    try:
        deployment.beat()
        began = time.monotonic()
        for number in range(kills):
            worker = deployment.worker()
            # Also while the drain is at it, and with a few deliveries left.
            goal = count * (number + dice.random()) / kills if number else 0
            until(lambda goal=goal: len(taken) >= goal and AuditedResult.objects.exists(), 120, every=0.02)
            time.sleep(dice.uniform(0, 0.3))
            kill(worker)
            note_what_is_lost()
        deployment.worker()
        until(lambda: stream.lag() == 0, 60, every=0.2)
        until(lambda: not Delivery.objects.exclude(status="delivered").exists(), 120, every=0.2)
    finally:
        deployment.close()
    took = time.monotonic() - began
    twice = taken.total() - len(taken)
    print(f"{len(taken)} of {count} in {took:.0f} s, {failed} failures, {kills} kills, {twice} told again")
    assert {str(each) for each in Delivery.objects.values_list("task_id", flat=True)} == made
    assert set(taken) == {str(each) for each in Delivery.objects.values_list("pk", flat=True)}
    assert len(taken) == count
    assert {each: count for each, count in taken.items() if count - lost.get(each, 0) > 1} == {}
    assert twice <= (count // 100 if LONG else kills * 4 * conf().webhooks.burst)


@pytest.mark.real_time
@pytest.mark.spec(
    "WHK-3", "An endpoint that hangs delays no other: with real workers p99 of the wait is at most 10 s (C-10)"
)
def test_a_hanging_endpoint_delays_nobody_in_a_deployment(
    loopback: None, make_receiver: MakeReceiver, make_delivery: MakeDelivery, deployment: Deployment
) -> None:
    hung, well = make_receiver(answer=hang), make_receiver(host="127.0.0.2")
    deployment.beat()
    deployment.worker()
    opened = datetime.now(UTC)
    for _ in range(300):
        make_delivery(hung.url(), due_at=opened - timedelta(seconds=60))
    until(lambda: len(hung.requests) >= conf().webhooks.slots_per_host, 30)
    opened = datetime.now(UTC)
    for _ in range(300):
        make_delivery(well.url(), due_at=opened)
    until(lambda: len(well.requests) == 300, 30)
    until(lambda: DeliveryAttempt.objects.filter(status_code=200).count() == 300)
    waits = sorted(
        (at - opened).total_seconds()
        for at in DeliveryAttempt.objects.filter(status_code=200).values_list("started_at", flat=True)
    )
    print("p99 of the wait", round(waits[-3], 2), "s")
    assert waits[-3] <= 10
