"""A Celery worker that is killed in the middle of a POST: the delivery goes out within a minute, under its own id."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings
from django.db import connection

from codeq_site.celery import app
from codeq_site.conf import conf
from codeq_site.redis import client
from queues.engine import keys
from tests.waiting import until
from tests.webhooks.conftest import MakeDelivery
from tests.webhooks.receiver import OK, Receiver, Request, hang, in_turn, raw, status
from webhooks import outbox
from webhooks.models import Delivery

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
StartWorker = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Real Celery workers on this test's database, in process groups of their own."""
    started: list[subprocess.Popen[bytes]] = []
    database = connection.settings_dict
    url = f"postgresql://postgres@/{database['NAME']}?host={database['OPTIONS'].get('host') or database['HOST']}"
    environment = {
        **os.environ,
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
        "CODEQ_WEBHOOKS_ALLOW_HOSTS": "127.0.0.0/8",
        "CODEQ_WEBHOOKS_RETRY_BASE_SECONDS": "0.1",
    }

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", "codeq_site", "--quiet", "worker", "--concurrency=2"]
        command += ["--loglevel=WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        started.append(subprocess.Popen(command, env=environment, cwd=settings.BASE_DIR, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.mark.real_time
@pytest.mark.spec("WHK-3", "A worker killed in mid-POST: delivered within 60 s, same id, one duplicate at most (B-6)")
def test_a_worker_killed_in_the_middle_of_a_post_loses_nothing(
    receiver: Receiver, make_delivery: MakeDelivery, start_worker: StartWorker
) -> None:
    receiver.answer = in_turn(hang, raw(OK))
    row = make_delivery(receiver.url())
    worker = start_worker()
    app.send_task("webhooks.deliver")
    until(lambda: receiver.requests, 30)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(10)

    row.refresh_from_db()
    assert (row.status, row.attempts) == ("pending", 0)
    # What has to pass before the next worker takes it: its reservation, and the dead run's turn.
    assert row.due_at - datetime.now(UTC) < timedelta(seconds=45)
    turn = keys.lock("webhooks.deliver")
    assert 0 < client().pttl(turn) <= 10_000
    Delivery.objects.update(due_at=datetime.now(UTC))
    client().delete(turn)

    start_worker()
    app.send_task("webhooks.deliver")
    until(lambda: Delivery.objects.get().status == "delivered", 30)
    assert {request.headers["webhook-id"] for request in receiver.requests} == {str(row.pk)}
    assert len(receiver.requests) == 2


@pytest.mark.real_time
@pytest.mark.spec("WHK-3", "Workers killed at random and one answer in five a failure: every delivery arrives (W-2)")
def test_every_delivery_arrives_whoever_dies(
    receiver: Receiver, make_delivery: MakeDelivery, start_worker: StartWorker
) -> None:
    dice = random.Random(20261118)
    arrived: Counter[str] = Counter()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        if dice.random() < 0.2:
            await status(500)(request, writer)
        else:
            arrived[request.headers["webhook-id"]] += 1
            await raw(OK)(request, writer)

    receiver.answer = answer
    ids = {str(make_delivery(receiver.url(f"/{number}")).pk) for number in range(300)}
    turn = keys.lock("webhooks.deliver")
    kills = 3

    def beat_until(reached: Callable[[], bool]) -> None:
        def tick() -> bool:
            app.send_task("webhooks.deliver")
            return reached()

        until(tick, 60, every=0.2)

    for kill in range(kills):
        worker = start_worker()
        beat_until(lambda goal=70 * (kill + 1): len(arrived) >= goal)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(10)
        # The time that would pass: the reservations of the dead, and its turn.
        Delivery.objects.filter(reservation__isnull=False).update(due_at=datetime.now(UTC))
        client().delete(turn)
    start_worker()
    beat_until(lambda: not Delivery.objects.exclude(status="delivered").exists())
    assert set(arrived) == ids
    # Only what a worker had reserved when it was killed can have come twice.
    assert max(arrived.values()) <= 1 + kills
    assert sum(arrived.values()) - len(ids) <= kills * conf().webhooks.slots_per_host * outbox.AHEAD
