"""A queue that becomes non-empty tells its workers: once, off the enqueue path, with what there is to do."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from standardwebhooks import Webhook

from core.redis.connections import client
from queues import maintenance, services, wakes
from queues.current_engine import engine
from queues.domain import NewTask
from queues.engine import keys
from tenants import services as tenants
from tenants.models import Tenant as TenantRow
from tenants.tenant import Tenant
from tests.webhooks.conftest import Clock, MakeReceiver
from tests.webhooks.receiver import Receiver, hang, status
from webhooks import notices, periodic_tasks, subscriptions
from webhooks.models import Subscription

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
Subscribe = Callable[..., Subscription]


@pytest.fixture
def tenant(acme: TenantRow) -> Tenant:
    return Tenant(tid=acme.tid, slug=acme.slug)


@pytest.fixture
def subscribe(tenant: Tenant, receiver: Receiver, clock: Clock) -> Subscribe:
    def call(worker: str = "w-1", **asked: Any) -> Subscription:
        usual: dict[str, Any] = {"callback_url": receiver.url(f"/{worker}"), "event_types": ["*"], "now": clock.now}
        return subscriptions.subscribe(asked.pop("tenant", tenant), worker, **(usual | asked))

    return call


def enqueue(tenant: Tenant, command: str = "render", count: int = 1, **fields: Any) -> None:
    services.enqueue(tenant, [NewTask(command=command, payload="1", **fields) for _ in range(count)]).run_sync()


def paths(receiver: Receiver) -> list[str]:
    return [request.path for request in receiver.requests]


@pytest.mark.spec("WHK-2", "A queue that becomes non-empty tells its subscribers what there is to do")
def test_an_enqueue_into_an_empty_queue_tells_the_subscriber(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    row = subscribe()
    enqueue(tenant, count=3)
    enqueue(tenant, delay_ms=60_000)
    assert notices.notify(clock=clock) == (1, 1)
    [request] = receiver.requests
    body = json.loads(request.body)
    assert list(body) == ["eventType", "available", "queueDepth", "claimUrl", "sentAt", "notificationId"]
    assert (body["eventType"], body["available"], body["queueDepth"]) == ("render", True, 4)
    assert body["claimUrl"] == "/v1/codeq/tasks/claim"
    assert datetime.fromisoformat(body["sentAt"]) == clock.now
    assert body["notificationId"] == request.headers["webhook-id"]
    Webhook(tenants.signing_secret("acme")).verify(
        request.body, request.headers | {"webhook-timestamp": request.headers["webhook-timestamp"]}
    )
    row.refresh_from_db()
    assert (row.notified_at, row.notified, row.last_status) == (clock.now, 1, 200)


@pytest.mark.spec("WHK-2", "Also when a delayed task is due, and when a task comes back")
def test_a_due_and_a_requeued_task_tell_too(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_900_000_000_000]
    monkeypatch.setattr(engine(), "clock", lambda: now[0])
    subscribe(min_interval_seconds=0)
    enqueue(tenant, "delayed", delay_ms=1000)
    assert notices.notify(clock=clock) == (0, 0)
    now[0] += 2000
    maintenance.repair(lambda: True)
    assert notices.notify(clock=clock) == (1, 1)

    [task] = services.claim(tenant, ["delayed"], "w", lease_seconds=1).run_sync().tasks
    services.abandon(tenant, task.id, "w").run_sync()
    clock.advance(seconds=1)
    assert notices.notify(clock=clock) == (1, 1)
    assert [json.loads(request.body)["eventType"] for request in receiver.requests] == ["delayed"] * 2


def test_nothing_is_told_of_a_queue_that_was_empty_again_or_is_paused(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe()
    enqueue(tenant)
    services.claim(tenant, ["render"], "w").run_sync()
    enqueue(tenant, "paused")
    services.pause(tenant, "paused").run_sync()
    assert notices.notify(clock=clock) == (0, 0)
    assert receiver.requests == []


@pytest.mark.spec("TEN-3", "A tenant's work tells that tenant's subscribers alone")
def test_another_tenants_queue_of_the_same_name_tells_nobody_here(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    TenantRow.objects.create(tid="zeta0002", slug="zeta")
    subscribe()
    enqueue(Tenant(tid="zeta0002", slug="zeta"))
    assert notices.notify(clock=clock) == (0, 0)


@pytest.mark.spec("WHK-1", "minIntervalSeconds: at most one notification in it, and none is lost (W-16)")
def test_what_falls_into_an_interval_is_told_when_it_is_over(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe(min_interval_seconds=5)
    for number in range(5):
        enqueue(tenant, f"c{number}")
        notices.notify(clock=clock)
        clock.advance(seconds=0.5)
    assert len(receiver.requests) == 1
    services.claim(tenant, ["c3"], "w").run_sync()  # somebody else has found it by then
    for _ in range(6):
        clock.advance(seconds=5)
        notices.notify(clock=clock)
    told = [json.loads(request.body)["eventType"] for request in receiver.requests]
    assert sorted(told) == ["c0", "c1", "c2", "c4"]
    assert Subscription.objects.get().owed == []


def test_who_asks_for_no_interval_is_told_of_every_queue_at_once(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe(min_interval_seconds=0)
    for number in range(30):
        enqueue(tenant, f"c{number}")
    assert notices.notify(clock=clock) == (30, 30)
    assert sorted(json.loads(request.body)["eventType"] for request in receiver.requests) == sorted(
        f"c{number}" for number in range(30)
    )
    assert notices.notify(clock=clock) == (0, 0)


@pytest.mark.spec("WHK-1", "An expired subscription is told nothing and is removed (W-16)")
def test_an_expired_subscription_is_told_nothing(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe(ttl_seconds=1, now=clock.now - timedelta(seconds=9))
    enqueue(tenant)
    assert notices.notify(clock=clock) == (0, 0)
    periodic_tasks.cleanup()
    assert not Subscription.objects.exists()


def test_a_dead_subscriber_costs_the_others_nothing(
    tenant: Tenant, receiver: Receiver, make_receiver: MakeReceiver, subscribe: Subscribe, clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(notices, "DEADLINE_SECONDS", 1.5)
    subscribe("hangs", callback_url=make_receiver(answer=hang).url())
    subscribe("fails", callback_url=make_receiver(answer=status(500)).url())
    subscribe("lives")
    enqueue(tenant)
    assert notices.notify(clock=clock) == (1, 3)
    assert paths(receiver) == ["/lives"]
    failing = dict(Subscription.objects.values_list("worker", "last_error"))
    assert failing == {"hangs": "no answer within 1.5 s", "fails": "HTTP 500", "lives": ""}


def test_a_group_of_workers_is_told_in_turn(
    tenant: Tenant, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    for number in range(3):
        subscribe(f"w-{number}", mode="group", group="pool", min_interval_seconds=0)
    for number in range(6):
        enqueue(tenant, f"c{number}")
        assert notices.notify(clock=clock) == (1, 1)
        clock.advance(seconds=1)
    assert sorted(paths(receiver)[:3]) == sorted(paths(receiver)[3:]) == ["/w-0", "/w-1", "/w-2"]


@pytest.mark.spec("WHK-2", "A notification costs the enqueue nothing: it is one SADD in the script, told by beat")
def test_an_enqueue_makes_no_call_itself(tenant: Tenant, receiver: Receiver, subscribe: Subscribe) -> None:
    subscribe()
    enqueue(tenant)
    assert receiver.connections == 0
    woken = keys.of_partition(engine().partition_of(tenant.tid)).woken
    assert client().smembers(woken) == {f"{tenant.tid}:render".encode()}
    assert wakes.take() == [wakes.Queue(tenant.tid, "render")]
    assert wakes.take() == []


def test_beat_tells_once_however_many_beats_there_are(tenant: Tenant, receiver: Receiver, subscribe: Subscribe) -> None:
    subscribe(now=datetime.now().astimezone())
    enqueue(tenant)
    assert [periodic_tasks.notify(), periodic_tasks.notify()] == ["1 of 1 told", "0 of 0 told"]
    assert len(receiver.requests) == 1
    assert uuid.UUID(receiver.requests[0].headers["webhook-id"])
