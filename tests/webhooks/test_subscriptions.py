"""Subscriptions: creation, renewal, deletion, and the recipients of each delivery mode."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from core.errors import Forbidden, InvalidRequest, NotFound
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tests.factories import SubscriptionFactory, TenantFactory
from tests.webhooks.conftest import Clock, Configure
from webhooks import subscriptions
from webhooks.models import Subscription

HOOK = "https://example.org/wake"


@pytest.fixture
def tenant(db: None, acme: Tenant) -> TenantSnapshot:
    return TenantSnapshot(tid=acme.tid, slug=acme.slug)


@pytest.fixture
def other(db: None) -> TenantSnapshot:
    TenantFactory(tid="zeta0002", slug="zeta")
    return TenantSnapshot(tid="zeta0002", slug="zeta")


@pytest.fixture
def subscribe(tenant: TenantSnapshot, clock: Clock) -> Any:
    def make(worker: str = "w-1", **fields: Any) -> Subscription:
        defaults: dict[str, Any] = {"callback_url": HOOK, "event_types": ["render"], "now": clock.now}
        return subscriptions.subscribe(fields.pop("tenant", tenant), worker, **(defaults | fields))

    return make


@pytest.mark.spec("WHK-1", "A worker creates, renews, lists and deletes its own subscriptions")
def test_subscription_lives_until_it_is_deleted_or_expires(
    tenant: TenantSnapshot, subscribe: Any, clock: Clock
) -> None:
    row = subscribe(ttl_seconds=60)
    assert row.expires_at == clock.now + timedelta(seconds=60)
    clock.advance(seconds=50)
    assert subscriptions.renew(tenant, "w-1", str(row.pk), clock.now).expires_at == clock.now + timedelta(seconds=60)
    assert [own.pk for own in subscriptions.list_own(tenant, "w-1", clock.now)] == [row.pk]
    clock.advance(seconds=61)
    assert subscriptions.list_own(tenant, "w-1", clock.now) == []
    with pytest.raises(NotFound):
        subscriptions.renew(tenant, "w-1", str(row.pk), clock.now)
    assert subscriptions.remove_expired(clock.now) == 1

    row = subscribe()
    subscriptions.unsubscribe(tenant, "w-1", str(row.pk), clock.now)
    assert not Subscription.objects.exists()


@pytest.mark.spec("TEN-3", "Another tenant's or worker's subscription appears not to exist")
def test_subscription_belongs_to_its_worker_only(
    tenant: TenantSnapshot, other: TenantSnapshot, subscribe: Any, clock: Clock
) -> None:
    row = subscribe()
    for caller, worker in ((other, "w-1"), (tenant, "w-2")):
        assert subscriptions.list_own(caller, worker, clock.now) == []
        for operation in (subscriptions.renew, subscriptions.unsubscribe):
            with pytest.raises(NotFound):
                operation(caller, worker, str(row.pk), clock.now)
    for invalid_id in ("", "x", "../1", str(uuid.uuid4())):
        with pytest.raises(NotFound):
            subscriptions.unsubscribe(tenant, "w-1", invalid_id, clock.now)


def test_worker_that_subscribes_again_renews_its_subscription(subscribe: Any, clock: Clock) -> None:
    first = subscribe(event_types=["a"])
    second = subscribe(event_types=["b"], min_interval_seconds=9)
    assert (first.pk, second.event_types, second.min_interval_seconds) == (second.pk, ["b"], 9)
    assert Subscription.objects.count() == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"callback_url": "http://127.0.0.1:8081/"}, InvalidRequest),
        ({"callback_url": "ftp://example.org/"}, InvalidRequest),
        ({"mode": "shout"}, InvalidRequest),
        ({"mode": "group"}, InvalidRequest),
        ({"mode": "group", "group": "g" * 129}, InvalidRequest),
        ({"ttl_seconds": 0}, InvalidRequest),
        ({"ttl_seconds": 86_401}, InvalidRequest),
        ({"min_interval_seconds": -1}, InvalidRequest),
        ({"event_types": []}, InvalidRequest),
        ({"group": "other", "worker_group": "mine"}, Forbidden),
    ],
    ids=str,
)
def test_invalid_subscription_is_refused(subscribe: Any, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        subscribe(**fields)
    assert not Subscription.objects.exists()


def test_token_with_a_group_subscribes_for_its_group(subscribe: Any) -> None:
    row = subscribe(worker_group="blue")
    assert (row.mode, row.group) == ("group", "blue")
    assert subscribe(worker_group="blue", mode="fanout").mode == "fanout"


def test_tenant_has_a_limited_number_of_subscriptions(
    subscribe: Any, other: TenantSnapshot, configure: Configure, clock: Clock
) -> None:
    configure(subscriptions=2)
    subscribe("w-1")
    subscribe("w-2")
    with pytest.raises(Forbidden):
        subscribe("w-3")
    subscribe("w-2")  # a renewal does not count
    subscribe("w-3", tenant=other)
    clock.advance(seconds=301)
    subscribe("w-3")


NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)


def build_subscription(number: int, mode: str = "fanout", **fields: Any) -> Subscription:
    defaults = {"tenant_id": "acme0001", "worker": f"w-{number}", "event_types": ["render"], "min_interval_seconds": 5}
    return SubscriptionFactory.build(id=uuid.UUID(int=number), mode=mode, callback_url=HOOK, **(defaults | fields))


def numbers(rows: list[Subscription]) -> list[int]:
    return [row.pk.int for row in rows]


@pytest.mark.spec("WHK-2", "fanout notifies every subscriber of the queue")
def test_fanout_notifies_every_subscriber() -> None:
    subscribers = [
        build_subscription(1),
        build_subscription(2, event_types=["*"]),
        build_subscription(3, event_types=["other"]),
    ]
    assert [numbers(rows) for rows in subscriptions.select_recipients(subscribers, "render", NOON)] == [[1, 2], []]


@pytest.mark.spec("WHK-1", "No subscriber is notified within its minIntervalSeconds; its notification is deferred")
def test_notification_within_the_interval_is_deferred() -> None:
    subscribers = [
        build_subscription(1, notified_at=NOON - timedelta(seconds=4)),
        build_subscription(2, notified_at=NOON - timedelta(seconds=5)),
    ]
    assert [numbers(rows) for rows in subscriptions.select_recipients(subscribers, "render", NOON)] == [[2], [1]]


@pytest.mark.spec("WHK-2", "group notifies one subscriber of each group in turn")
def test_group_notifies_one_subscriber_of_each_group_in_turn() -> None:
    members = [build_subscription(number, "group", group="red", min_interval_seconds=0) for number in range(1, 4)]
    members += [build_subscription(number, "group", group="blue", min_interval_seconds=0) for number in range(4, 6)]
    turns: list[list[int]] = []
    for second in range(6):
        now = NOON + timedelta(seconds=second)
        ready, deferred = subscriptions.select_recipients(members, "render", now)
        assert deferred == []
        for subscription in ready:
            subscription.notified_at = now
        turns.append(numbers(ready))
    assert turns == [[1, 4], [2, 5], [3, 4], [1, 5], [2, 4], [3, 5]]


def test_group_without_a_ready_member_defers_to_one() -> None:
    members = [
        build_subscription(number, "group", group="red", notified_at=NOON - timedelta(seconds=number))
        for number in (1, 2)
    ]
    assert [numbers(rows) for rows in subscriptions.select_recipients(members, "render", NOON)] == [[], [2]]


@pytest.mark.spec(
    "WHK-2", "hash notifies the same subscriber for a queue; when one is deleted, only its queues are reassigned"
)
def test_hash_is_stable_and_distributes_the_queues() -> None:
    members = [build_subscription(number, "hash", event_types=["*"]) for number in range(1, 11)]
    commands = [f"command-{number}" for number in range(1000)]

    def winners(present: list[Subscription]) -> dict[str, int]:
        return {command: numbers(subscriptions.select_recipients(present, command, NOON)[0])[0] for command in commands}

    before = winners(members)
    assert before == winners(list(reversed(members)))
    shares = [list(before.values()).count(number) for number in range(1, 11)]
    assert min(shares) > 50
    after = winners(members[1:])
    assert {command for command in commands if before[command] != after[command]} == {
        command for command in commands if before[command] == 1
    }


@pytest.mark.django_db
def test_subscriptions_of_many_tenants_are_one_query(clock: Clock) -> None:
    with CaptureQueriesContext(connection) as queries:
        subscriptions.live_by_tenant([f"t{number}" for number in range(500)], clock.now)
    assert len(queries) == 1
