"""A queue that turns non-empty notifies its subscribers once, outside the enqueue request."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from standardwebhooks import Webhook

from core.redis.connections import client
from queues import maintenance, services
from queues.current_engine import engine
from queues.domain import NewTask
from queues.engine import keys
from tenants import services as tenants
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tests.factories import TenantFactory
from tests.webhooks.conftest import Clock, MakeReceiver
from tests.webhooks.receiver import Receiver, hang, status
from webhooks import nonempty_queues, notifications, periodic_tasks, subscriptions
from webhooks import services as webhook_services
from webhooks.models import Subscription

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
Subscribe = Callable[..., Subscription]


@pytest.fixture
def tenant(acme: Tenant) -> TenantSnapshot:
    return TenantSnapshot(tid=acme.tid, slug=acme.slug)


@pytest.fixture
def subscribe(tenant: TenantSnapshot, receiver: Receiver, clock: Clock) -> Subscribe:
    def make(worker: str = "w-1", **fields: Any) -> Subscription:
        defaults: dict[str, Any] = {"callback_url": receiver.url(f"/{worker}"), "event_types": ["*"], "now": clock.now}
        return subscriptions.subscribe(fields.pop("tenant", tenant), worker, **(defaults | fields))

    return make


def enqueue(tenant: TenantSnapshot, command: str = "render", count: int = 1, **fields: Any) -> None:
    services.enqueue(tenant, [NewTask(command=command, payload="1", **fields) for _ in range(count)]).run_sync()


def paths(receiver: Receiver) -> list[str]:
    return [request.path for request in receiver.requests]


@pytest.mark.spec("WHK-2", "A queue that becomes non-empty notifies its subscribers with its depth")
def test_enqueue_into_an_empty_queue_notifies_the_subscriber(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    row = subscribe()
    enqueue(tenant, count=3)
    enqueue(tenant, delay_ms=60_000)
    assert notifications.notify(clock=clock) == (1, 1)
    [request] = receiver.requests
    body = json.loads(request.body)
    assert list(body) == ["eventType", "available", "queueDepth", "claimUrl", "sentAt", "notificationId"]
    assert (body["eventType"], body["available"], body["queueDepth"]) == ("render", True, 4)
    assert body["claimUrl"] == "/v1/codeq/tasks/claim"
    assert datetime.fromisoformat(body["sentAt"]) == clock.now
    assert body["notificationId"] == request.headers["webhook-id"]
    Webhook(tenants.get_or_create_signing_secret("acme")).verify(
        request.body, request.headers | {"webhook-timestamp": request.headers["webhook-timestamp"]}
    )
    row.refresh_from_db()
    assert (row.notified_at, row.notified, row.last_status) == (clock.now, 1, 200)


@pytest.mark.spec("WHK-2", "A notification is signed with the secret of its endpoint, with and without a query string")
@pytest.mark.parametrize("path", ["/own", "/own?worker=1"])
def test_notification_is_signed_with_the_secret_of_its_endpoint(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock, path: str
) -> None:
    _, secret = webhook_services.register(tenant.tid, receiver.url("/own"))
    subscribe(callback_url=receiver.url(path))
    enqueue(tenant)
    assert notifications.notify(clock=clock) == (1, 1)
    [request] = receiver.requests
    Webhook(secret).verify(request.body, request.headers)


@pytest.mark.spec("WHK-2", "A delayed task that is due and a task that returns to its queue notify too")
def test_due_and_requeued_tasks_notify_too(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_900_000_000_000]
    monkeypatch.setattr(engine(), "clock", lambda: now[0])
    subscribe(min_interval_seconds=0)
    enqueue(tenant, "delayed", delay_ms=1000)
    assert notifications.notify(clock=clock) == (0, 0)
    now[0] += 2000
    maintenance.repair(lambda: True)
    assert notifications.notify(clock=clock) == (1, 1)

    [task] = services.claim(tenant, ["delayed"], "w", lease_seconds=1).run_sync().tasks
    services.abandon(tenant, task.id, "w").run_sync()
    clock.advance(seconds=1)
    assert notifications.notify(clock=clock) == (1, 1)
    assert [json.loads(request.body)["eventType"] for request in receiver.requests] == ["delayed"] * 2


def test_empty_or_paused_queue_notifies_nobody(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe()
    enqueue(tenant)
    services.claim(tenant, ["render"], "w").run_sync()
    enqueue(tenant, "paused")
    services.pause(tenant, "paused").run_sync()
    assert notifications.notify(clock=clock) == (0, 0)
    assert receiver.requests == []


@pytest.mark.spec("TEN-3", "A tenant's tasks notify that tenant's subscribers only")
def test_other_tenants_queue_of_the_same_name_notifies_nobody(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    TenantFactory(tid="zeta0002", slug="zeta")
    subscribe()
    enqueue(TenantSnapshot(tid="zeta0002", slug="zeta"))
    assert notifications.notify(clock=clock) == (0, 0)


@pytest.mark.spec("WHK-1", "At most one notification per minIntervalSeconds, and deferred ones are sent later")
def test_queue_deferred_by_the_interval_is_notified_after_it(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe(min_interval_seconds=5)
    for number in range(5):
        enqueue(tenant, f"c{number}")
        notifications.notify(clock=clock)
        clock.advance(seconds=0.5)
    assert len(receiver.requests) == 1
    services.claim(tenant, ["c3"], "w").run_sync()  # another worker has claimed it
    for _ in range(6):
        clock.advance(seconds=5)
        notifications.notify(clock=clock)
    notified = [json.loads(request.body)["eventType"] for request in receiver.requests]
    assert sorted(notified) == ["c0", "c1", "c2", "c4"]
    assert Subscription.objects.get().deferred_commands == []


def test_subscriber_without_interval_is_notified_of_every_queue_at_once(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe(min_interval_seconds=0)
    for number in range(30):
        enqueue(tenant, f"c{number}")
    assert notifications.notify(clock=clock) == (30, 30)
    assert sorted(json.loads(request.body)["eventType"] for request in receiver.requests) == sorted(
        f"c{number}" for number in range(30)
    )
    assert notifications.notify(clock=clock) == (0, 0)


@pytest.mark.spec("WHK-1", "An expired subscription is not notified and is deleted")
def test_expired_subscription_is_not_notified(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    subscribe(ttl_seconds=1, now=clock.now - timedelta(seconds=9))
    enqueue(tenant)
    assert notifications.notify(clock=clock) == (0, 0)
    periodic_tasks.cleanup()
    assert not Subscription.objects.exists()


def test_dead_subscriber_does_not_delay_the_others(
    tenant: TenantSnapshot, receiver: Receiver, make_receiver: MakeReceiver, subscribe: Subscribe, clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(notifications, "DEADLINE_SECONDS", 1.5)
    subscribe("hangs", callback_url=make_receiver(answer=hang).url())
    subscribe("fails", callback_url=make_receiver(answer=status(500)).url())
    subscribe("lives")
    enqueue(tenant)
    assert notifications.notify(clock=clock) == (1, 3)
    assert paths(receiver) == ["/lives"]
    failing = dict(Subscription.objects.values_list("worker", "last_error"))
    assert failing == {"hangs": "no response within 1.5 s", "fails": "HTTP 500", "lives": ""}


def test_members_of_a_group_are_notified_in_turn(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe, clock: Clock
) -> None:
    for number in range(3):
        subscribe(f"w-{number}", mode="group", group="pool", min_interval_seconds=0)
    for number in range(6):
        enqueue(tenant, f"c{number}")
        assert notifications.notify(clock=clock) == (1, 1)
        clock.advance(seconds=1)
    assert sorted(paths(receiver)[:3]) == sorted(paths(receiver)[3:]) == ["/w-0", "/w-1", "/w-2"]


@pytest.mark.spec("WHK-2", "A notification costs the enqueue one SADD in its script; a periodic task sends it")
def test_enqueue_sends_no_request_itself(tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe) -> None:
    subscribe()
    enqueue(tenant)
    assert receiver.connections == 0
    woken = keys.of_partition(engine().partition_of(tenant.tid)).woken
    assert client().smembers(woken) == {f"{tenant.tid}:render".encode()}
    assert nonempty_queues.take() == [nonempty_queues.QueueRef(tenant.tid, "render")]
    assert nonempty_queues.take() == []


def test_second_run_of_the_periodic_task_notifies_nobody(
    tenant: TenantSnapshot, receiver: Receiver, subscribe: Subscribe
) -> None:
    subscribe(now=datetime.now().astimezone())
    enqueue(tenant)
    assert [periodic_tasks.notify(), periodic_tasks.notify()] == [
        "1 of 1 notifications delivered",
        "0 of 0 notifications delivered",
    ]
    assert len(receiver.requests) == 1
    assert uuid.UUID(receiver.requests[0].headers["webhook-id"])
