"""Workers subscribe, renew and end; and what each mode means for who is told."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from core.errors import Forbidden, InvalidRequest, NotFound
from tenants.models import Tenant as TenantRow
from tenants.tenant import Tenant
from tests.webhooks.conftest import Clock, Configure
from webhooks import subscriptions
from webhooks.models import Subscription

HOOK = "https://example.org/wake"


@pytest.fixture
def tenant(db: None, acme: TenantRow) -> Tenant:
    return Tenant(tid=acme.tid, slug=acme.slug)


@pytest.fixture
def other(db: None) -> Tenant:
    TenantRow.objects.create(tid="zeta0002", slug="zeta")
    return Tenant(tid="zeta0002", slug="zeta")


@pytest.fixture
def subscribe(tenant: Tenant, clock: Clock) -> Any:
    def call(worker: str = "w-1", **asked: Any) -> Subscription:
        usual: dict[str, Any] = {"callback_url": HOOK, "event_types": ["render"], "now": clock.now}
        return subscriptions.subscribe(asked.pop("tenant", tenant), worker, **(usual | asked))

    return call


@pytest.mark.spec("WHK-1", "A worker subscribes, renews, lists and ends its own subscriptions")
def test_a_subscription_lives_until_it_ends_or_is_not_renewed(tenant: Tenant, subscribe: Any, clock: Clock) -> None:
    row = subscribe(ttl_seconds=60)
    assert row.expires_at == clock.now + timedelta(seconds=60)
    clock.advance(seconds=50)
    assert subscriptions.renew(tenant, "w-1", str(row.pk), clock.now).expires_at == clock.now + timedelta(seconds=60)
    assert [each.pk for each in subscriptions.own(tenant, "w-1", clock.now)] == [row.pk]
    clock.advance(seconds=61)
    assert subscriptions.own(tenant, "w-1", clock.now) == []
    with pytest.raises(NotFound):
        subscriptions.renew(tenant, "w-1", str(row.pk), clock.now)
    assert subscriptions.remove_expired(clock.now) == 1

    row = subscribe()
    subscriptions.end(tenant, "w-1", str(row.pk), clock.now)
    assert not Subscription.objects.exists()


@pytest.mark.spec("TEN-3", "Another tenant's or worker's subscription is as if it did not exist")
def test_a_subscription_is_its_workers_alone(tenant: Tenant, other: Tenant, subscribe: Any, clock: Clock) -> None:
    row = subscribe()
    for stranger, worker in ((other, "w-1"), (tenant, "w-2")):
        assert subscriptions.own(stranger, worker, clock.now) == []
        for act in (subscriptions.renew, subscriptions.end):
            with pytest.raises(NotFound):
                act(stranger, worker, str(row.pk), clock.now)
    for nonsense in ("", "x", "../1", str(uuid.uuid4())):
        with pytest.raises(NotFound):
            subscriptions.end(tenant, "w-1", nonsense, clock.now)


def test_a_worker_that_restarts_and_subscribes_again_is_the_same_subscriber(subscribe: Any, clock: Clock) -> None:
    first = subscribe(event_types=["a"])
    second = subscribe(event_types=["b"], min_interval_seconds=9)
    assert (first.pk, second.event_types, second.min_interval_seconds) == (second.pk, ["b"], 9)
    assert Subscription.objects.count() == 1


@pytest.mark.parametrize(
    ("asked", "error"),
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
def test_what_makes_no_sense_is_refused(subscribe: Any, asked: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        subscribe(**asked)
    assert not Subscription.objects.exists()


def test_a_token_with_a_group_subscribes_for_its_group(subscribe: Any) -> None:
    row = subscribe(worker_group="blue")
    assert (row.mode, row.group) == ("group", "blue")
    assert subscribe(worker_group="blue", mode="fanout").mode == "fanout"


def test_a_tenant_has_so_many_subscriptions_and_no_more(
    subscribe: Any, other: Tenant, configure: Configure, clock: Clock
) -> None:
    configure(subscriptions=2)
    subscribe("w-1")
    subscribe("w-2")
    with pytest.raises(Forbidden):
        subscribe("w-3")
    subscribe("w-2")  # a renewal is none more
    subscribe("w-3", tenant=other)
    clock.advance(seconds=301)
    subscribe("w-3")


NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)


def sub(number: int, mode: str = "fanout", **fields: Any) -> Subscription:
    usual: dict[str, Any] = {
        "id": uuid.UUID(int=number), "tenant_id": "acme0001", "worker": f"w-{number}", "callback_url": HOOK,
        "event_types": ["render"], "mode": mode, "min_interval_seconds": 5,
    }  # fmt: skip
    return Subscription(**(usual | fields))


def numbers(rows: list[Subscription]) -> list[int]:
    return [row.pk.int for row in rows]


@pytest.mark.spec("WHK-2", "fanout tells everybody who listens to that queue")
def test_fanout_tells_everybody_who_listens() -> None:
    everybody = [sub(1), sub(2, event_types=["*"]), sub(3, event_types=["other"])]
    assert [numbers(rows) for rows in subscriptions.chosen(everybody, "render", NOON)] == [[1, 2], []]


@pytest.mark.spec("WHK-1", "Nobody is told more often than its minIntervalSeconds; what was missed is owed")
def test_an_interval_that_is_not_over_defers() -> None:
    everybody = [sub(1, notified_at=NOON - timedelta(seconds=4)), sub(2, notified_at=NOON - timedelta(seconds=5))]
    assert [numbers(rows) for rows in subscriptions.chosen(everybody, "render", NOON)] == [[2], [1]]


@pytest.mark.spec("WHK-2", "group tells one of each group, in turn (W-16)")
def test_group_tells_exactly_one_of_each_group_in_turn() -> None:
    members = [sub(number, "group", group="red", min_interval_seconds=0) for number in range(1, 4)]
    members += [sub(number, "group", group="blue", min_interval_seconds=0) for number in range(4, 6)]
    turns: list[list[int]] = []
    for second in range(6):
        now = NOON + timedelta(seconds=second)
        call, later = subscriptions.chosen(members, "render", now)
        assert later == []
        for each in call:
            each.notified_at = now
        turns.append(numbers(call))
    assert turns == [[1, 4], [2, 5], [3, 4], [1, 5], [2, 4], [3, 5]]


def test_a_group_whose_members_were_all_just_told_owes_it_to_one() -> None:
    members = [sub(number, "group", group="red", notified_at=NOON - timedelta(seconds=number)) for number in (1, 2)]
    assert [numbers(rows) for rows in subscriptions.chosen(members, "render", NOON)] == [[], [2]]


@pytest.mark.spec("WHK-2", "hash tells the same one for a queue, and one who leaves moves only its own queues")
def test_hash_is_stable_and_spreads() -> None:
    members = [sub(number, "hash", event_types=["*"]) for number in range(1, 11)]
    commands = [f"command-{number}" for number in range(1000)]

    def winners(present: list[Subscription]) -> dict[str, int]:
        return {command: numbers(subscriptions.chosen(present, command, NOON)[0])[0] for command in commands}

    before = winners(members)
    assert before == winners(list(reversed(members)))
    shares = [list(before.values()).count(number) for number in range(1, 11)]
    assert min(shares) > 50
    after = winners(members[1:])
    assert {command for command in commands if before[command] != after[command]} == {
        command for command in commands if before[command] == 1
    }


@pytest.mark.django_db
def test_finding_who_listens_is_one_query_however_many_tenants(clock: Clock) -> None:
    with CaptureQueriesContext(connection) as queries:
        subscriptions.of_tenants([f"t{number}" for number in range(500)], clock.now)
    assert len(queries) == 1
