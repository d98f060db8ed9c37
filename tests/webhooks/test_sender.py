"""The sender: deliveries are retried until they succeed, and no endpoint delays another."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import uuid
from datetime import timedelta

import pytest
from django.db import connections
from standardwebhooks import Webhook

from core.metrics import scrape
from tenants import services as tenants
from tenants.models import Tenant
from tests.factories import CircuitFactory, TenantFactory
from tests.waiting import until
from tests.webhooks.conftest import Clock, Configure, MakeDelivery, MakeReceiver, Send
from tests.webhooks.receiver import OK, Receiver, Request, hang, in_turn, raw, status
from webhooks import delivery_results, due_deliveries, services
from webhooks.http import PostResult
from webhooks.models import Circuit, Delivery, DeliveryAttempt, Endpoint
from webhooks.retry_schedule import RetryDecision, Verdict
from webhooks.sender import RECENT_START_SECONDS, Sender

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


@pytest.mark.spec("WHK-6", "Every attempt is recorded with its time, duration and response")
def test_delivery_and_its_attempts_are_recorded(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock
) -> None:
    receiver.answer = in_turn(status(500, b"broken \0 " + b"x" * 5000), raw(OK))
    row = make_delivery(receiver.url("/hook?x=1"))
    assert send().failed == 1
    row.refresh_from_db()
    assert (row.status, row.attempts_since_replay, row.last_status, row.last_error) == ("pending", 1, 500, "HTTP 500")
    assert timedelta(seconds=1.7) < row.due_at - clock.now < timedelta(seconds=2.3)
    assert send().failed == 0  # not before it is due
    clock.advance(seconds=3)
    assert send().delivered == 1
    row.refresh_from_db()
    assert (row.status, row.attempts, row.last_status, row.reservation) == ("delivered", 2, 200, None)
    first, second = DeliveryAttempt.objects.filter(delivery=row).order_by("number")
    assert (first.status_code, first.error, len(first.answer)) == (500, "HTTP 500", 2048 + len("\\u0000") - 1)
    assert first.answer.startswith("broken \\u0000 xx")
    assert (second.status_code, second.error, second.answer) == (200, "", "ok")
    assert {request.headers["webhook-id"] for request in receiver.requests} == {str(row.pk)}
    assert len(receiver.requests) == 2


@pytest.mark.spec("WHK-3", "Attempts follow the schedule for more than a day, then the delivery is given up")
def test_delivery_is_retried_for_a_day_and_then_given_up(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock, configure: Configure
) -> None:
    configure(failures_to_pause=1000)
    receiver.answer = status(500)
    row = make_delivery(receiver.url())
    started = clock.now
    for _ in range(12):
        send()
        row.refresh_from_db()
        clock.now = max(clock.now, row.due_at)
    assert row.status == "given up"
    assert len(receiver.requests) == 12
    assert clock.now - started > timedelta(hours=21)
    send()
    assert len(receiver.requests) == 12


@pytest.mark.spec("WHK-4", "A delivery is signed with the tenant's valid secrets, or with the endpoint's own")
def test_delivery_is_signed_with_the_valid_secrets(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock, acme: Tenant
) -> None:
    former = tenants.get_or_create_signing_secret("acme")
    make_delivery(receiver.url())
    send()
    new = tenants.rotate_signing_secret("acme").reveal()
    make_delivery(receiver.url())
    send()
    endpoint, own = services.register(acme.pk, receiver.url("/other"))
    newer = services.rotate(endpoint, clock.now)
    make_delivery(receiver.url("/other?x"))
    send()
    other_tenant = TenantFactory(slug="stranger")
    other_secret = tenants.get_or_create_signing_secret(other_tenant.slug)
    first, second, third = receiver.requests
    for request, secrets in ((first, [former]), (second, [former, new]), (third, [own, newer])):
        for secret in secrets:
            Webhook(secret).verify(request.body, request.headers)
        for secret in {former, new, own, newer, other_secret} - set(secrets):
            with pytest.raises(Exception, match="No matching signature"):
                Webhook(secret).verify(request.body, request.headers)


def test_tenant_without_a_secret_gets_one(receiver: Receiver, make_delivery: MakeDelivery, send: Send) -> None:
    make_delivery(receiver.url())
    send()
    [request] = receiver.requests
    Webhook(tenants.get_or_create_signing_secret("acme")).verify(request.body, request.headers)


@pytest.mark.spec("WHK-3", "410 disables the endpoint; missed deliveries can be recovered from a given time")
def test_endpoint_that_answers_410_is_disabled_and_can_be_recovered(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock, acme: Tenant
) -> None:
    receiver.answer = status(410)
    old = make_delivery(receiver.url("/a?n=1"), created_at=clock.now - timedelta(days=2))
    elsewhere = make_delivery(receiver.url("/b"), due_at=clock.now + timedelta(hours=1))
    waiting = make_delivery(receiver.url("/a?n=2"), due_at=clock.now + timedelta(hours=1))
    send()
    endpoint = Endpoint.objects.get()
    assert (endpoint.address, endpoint.is_enabled) == (receiver.url("/a"), False)
    assert endpoint.disabled_because == "The endpoint answered 410 Gone."
    statuses = dict(Delivery.objects.values_list("pk", "status"))
    assert statuses == {old.pk: "held", waiting.pk: "held", elsewhere.pk: "pending"}

    receiver.answer = raw(OK)
    assert services.recover(endpoint, clock.now - timedelta(days=1), clock.now) == 1
    assert send().delivered == 1
    assert receiver.requests[-1].path == "/a?n=2"
    assert services.recover(endpoint, clock.now - timedelta(days=3), clock.now) == 1
    assert send().delivered == 1
    assert receiver.requests[-1].headers["webhook-id"] == str(old.pk)


@pytest.mark.spec("WHK-3", "An endpoint that fails for five days is disabled, with a reason")
def test_endpoint_that_fails_for_days_is_disabled(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock, configure: Configure
) -> None:
    configure(failures_to_pause=1000)
    receiver.answer = status(500)
    for _ in range(5):  # each day, a delivery that has used its quick attempts fails again
        make_delivery(receiver.url(), attempts_since_replay=4)
        send()
        clock.advance(days=1)
    assert Endpoint.objects.get().failing_since == clock.now - timedelta(days=5)
    assert services.disable_failing(clock.now - timedelta(seconds=1)) == 0
    assert services.disable_failing(clock.now) == 1
    assert services.disable_failing(clock.now) == 0
    assert Endpoint.objects.get().disabled_because == "The endpoint failed for 5 days."
    assert set(Delivery.objects.values_list("status", flat=True)) == {"held"}


def test_endpoint_that_recovers_by_itself_is_not_disabled(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock
) -> None:
    receiver.answer = in_turn(status(500), raw(OK))
    make_delivery(receiver.url(), attempts_since_replay=4)
    send()
    assert Endpoint.objects.get().failing_since
    make_delivery(receiver.url())
    send()
    assert Endpoint.objects.get().failing_since is None
    assert services.disable_failing(clock.now + timedelta(days=9)) == 0


@pytest.mark.spec("WHK-3", "A host that keeps failing is only probed, and served again once it responds")
def test_failing_host_is_paused_probed_and_served_again(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock
) -> None:
    receiver.answer = status(503)
    for number in range(60):
        make_delivery(receiver.url(f"/{number}"))
    send()
    sent = len(receiver.requests)
    assert sent <= 20 + 12 * due_deliveries.RESERVED_PER_SLOT  # reserved before the first failure
    circuit = Circuit.objects.get()
    assert circuit.failures == sent
    assert circuit.paused_until

    for number in range(3):  # one probe per half minute
        send()
        assert len(receiver.requests) == sent + number
        clock.advance(seconds=31)
        send()
        assert len(receiver.requests) == sent + number + 1
    receiver.answer = raw(OK)
    clock.advance(seconds=31)
    send()
    assert not Circuit.objects.exists()
    clock.advance(hours=1)
    send()
    assert set(Delivery.objects.values_list("status", flat=True)) == {"delivered"}


def test_failures_of_one_tenant_do_not_pause_a_host_for_another(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock, acme: Tenant
) -> None:
    other = TenantFactory(slug="other")
    CircuitFactory(
        tenant=acme, host=f"127.0.0.1:{receiver.port}", failures=99, updated_at=clock.now,
        paused_until=clock.now + timedelta(seconds=30),
    )  # fmt: skip
    make_delivery(receiver.url("/acme"))
    make_delivery(receiver.url("/other"), tenant=other)
    send()
    assert [request.path for request in receiver.requests] == ["/other"]


@pytest.mark.spec("WHK-3", "A hanging endpoint holds a tenth of the slots and delays no other")
def test_hanging_endpoint_does_not_delay_the_others(
    loopback: None, configure: Configure, make_receiver: MakeReceiver, make_delivery: MakeDelivery, clock: Clock
) -> None:
    configure(deadline_seconds=20, slots=60, slots_per_host=6)
    hanging = make_receiver(answer=hang)
    others = [make_receiver(host=f"127.0.0.{number}") for number in range(2, 12)]
    for number in range(200):
        make_delivery(hanging.url(), due_at=clock.now - timedelta(seconds=10))
        make_delivery(others[number % 10].url())
    sender = Sender(clock=clock)
    thread = threading.Thread(target=lambda: (asyncio.run(sender.run(lambda: True, 2)), connections.close_all()))
    thread.start()
    until(lambda: sender.delivered >= 200, 15)  # if it takes longer, they have waited for the hanging one
    assert len(hanging.requests) <= 6
    hanging.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert hanging.connections <= 6 * 2


@pytest.mark.spec("WHK-3", "The setting max_unrecorded limits the POSTs that a killed worker repeats")
def test_number_of_unrecorded_starts_is_limited(
    loopback: None, configure: Configure, make_receiver: MakeReceiver, make_delivery: MakeDelivery, send: Send
) -> None:
    configure(max_unrecorded=2)
    started = []

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        started.append(time.monotonic())
        await asyncio.sleep(0.5)  # slow attempts do not count: all start before one has finished
        await raw(OK)(request, writer)

    receiver = make_receiver(host="0.0.0.0", answer=answer)
    for number in range(20):
        make_delivery(receiver.url(host=f"127.0.0.{2 + number}"))
    assert send().delivered == 20
    assert started[-1] - started[0] >= 5 * RECENT_START_SECONDS


@pytest.mark.spec("WHK-3", "A dead worker's deliveries are due again within a minute, under the same ids")
def test_reservation_expires_and_the_delivery_keeps_its_id(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock
) -> None:
    row = make_delivery(receiver.url())
    dead_sender = uuid.uuid4()
    assert [delivery.id for delivery in due_deliveries.reserve(dead_sender, 10, clock.now)] == [row.pk]
    send()
    assert receiver.requests == []
    clock.advance(seconds=31)
    send()
    assert [request.headers["webhook-id"] for request in receiver.requests] == [str(row.pk)]


@pytest.mark.spec("BEA-1", "Concurrent senders never send the same delivery")
def test_concurrent_senders_send_nothing_twice(receiver: Receiver, make_delivery: MakeDelivery, clock: Clock) -> None:
    for number in range(300):
        make_delivery(receiver.url(f"/{number}"))

    def run_sender() -> None:
        asyncio.run(Sender(clock=clock).run(lambda: True, 20))
        connections.close_all()

    threads = [threading.Thread(target=run_sender) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # A sender ends when the others hold all slots of the host; the next run sends the rest.
    asyncio.run(Sender(clock=clock).run(lambda: True, 20))
    connections.close_all()
    assert sorted(request.path for request in receiver.requests) == sorted(f"/{number}" for number in range(300))
    assert set(Delivery.objects.values_list("status", flat=True)) == {"delivered"}


def test_after_its_reservation_a_failure_is_ignored_and_a_success_counts(
    receiver: Receiver, make_delivery: MakeDelivery, clock: Clock
) -> None:
    """A sender that was frozen past the end of its reservation resumes and records its results."""
    row = make_delivery(receiver.url())
    frozen_sender, other_sender = uuid.uuid4(), uuid.uuid4()
    [delivery] = due_deliveries.reserve(frozen_sender, 1, clock.now)
    clock.advance(seconds=31)
    assert due_deliveries.reserve(other_sender, 1, clock.now)

    def record_result(code: int, verdict: str) -> None:
        decision = RetryDecision(Verdict(verdict), clock.now + timedelta(hours=9))
        result = delivery_results.DeliveryResult(delivery, clock.now, PostResult(code, "", 1), decision)
        delivery_results.record(frozen_sender, [result], clock.now)
        row.refresh_from_db()

    record_result(500, "retry")
    assert (row.status, row.reservation, row.attempts_since_replay) == ("pending", other_sender, 0)
    record_result(200, "delivered")
    assert (row.status, row.reservation) == ("delivered", None)


def test_run_that_must_stop_releases_unstarted_deliveries(
    loopback: None, configure: Configure, make_receiver: MakeReceiver, make_delivery: MakeDelivery, clock: Clock
) -> None:
    configure(deadline_seconds=1, slots_per_host=2)
    hanging = make_receiver(answer=hang)
    for _ in range(8):
        make_delivery(hanging.url())
    may_continue = iter([True])
    calls: list[int] = []
    sender = Sender(clock=clock)
    asyncio.run(sender.run(lambda: next(may_continue, False), 20, on_reserving_ended=lambda: calls.append(1)))
    connections.close_all()
    assert calls == [1]
    assert sender.failed == 2
    assert Delivery.objects.filter(reservation=None, due_at__lte=clock.now, attempts_since_replay=0).count() == 6


@pytest.mark.spec("WHK-6", "An operator's replay sends a delivery again under its own id")
def test_replay_sends_again_under_the_same_id(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock
) -> None:
    row = make_delivery(receiver.url())
    send()
    pending = make_delivery(receiver.url(), due_at=clock.now + timedelta(hours=1))
    assert services.replay(Delivery.objects.all(), clock.now) == 1
    send()
    assert [request.headers["webhook-id"] for request in receiver.requests] == [str(row.pk)] * 2
    pending.refresh_from_db()
    assert pending.due_at == clock.now + timedelta(hours=1)
    row.refresh_from_db()
    assert (row.attempts, row.attempts_since_replay) == (2, 1)


def test_ended_deliveries_are_deleted_after_their_retention(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock
) -> None:
    make_delivery(receiver.url())
    send()
    waiting = make_delivery(receiver.url(), due_at=clock.now + timedelta(days=99))
    assert services.cleanup(clock.now + timedelta(days=29)) == 0
    assert services.cleanup(clock.now + timedelta(days=31)) == 1
    assert list(Delivery.objects.values_list("pk", flat=True)) == [waiting.pk]
    assert not DeliveryAttempt.objects.exists()


def test_invalid_trace_context_is_not_sent(receiver: Receiver, make_delivery: MakeDelivery, send: Send) -> None:
    make_delivery(receiver.url(), trace_parent="00-zz\r\nX-Evil: 1", trace_state="a=b")
    make_delivery(receiver.url(), trace_parent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", trace_state="a\r\nX-Evil: 1")
    assert send().delivered == 2
    for request in receiver.requests:
        assert "x-evil" not in request.headers
        assert "tracestate" not in request.headers
        json.loads(request.body)


@pytest.mark.spec("AUT-3", "A tenant's callbacks do not exceed its rate and delay no other tenant")
def test_callbacks_do_not_exceed_the_rate_of_their_tenant(
    receiver: Receiver, make_delivery: MakeDelivery, send: Send, clock: Clock, acme: Tenant
) -> None:
    Tenant.objects.filter(pk=acme.pk).update(webhook_per_second=5)
    other = TenantFactory(slug="other")
    for _ in range(40):
        make_delivery(receiver.url("/acme"))
        make_delivery(receiver.url("/other"), tenant=other)
    started = time.monotonic()
    send()
    seconds = time.monotonic() - started
    paths = [request.path for request in receiver.requests]
    assert paths.count("/other") == 40
    assert 10 <= paths.count("/acme") <= min(39, 11 + 5 * seconds)  # the burst is two seconds of the rate
    assert Delivery.objects.filter(
        status="pending", reservation=None, due_at__gt=clock.now
    ).count() == 40 - paths.count("/acme")


def test_attempts_are_counted_by_outcome(receiver: Receiver, make_delivery: MakeDelivery, send: Send) -> None:
    def read_counter(outcome: str) -> float:
        pattern = rf'codeq_webhook_deliveries_total{{command="counted",kind="task_result",outcome="{outcome}"}} (\S+)'
        match = re.search(pattern, scrape().decode())
        return float(match[1]) if match else 0.0

    receiver.answer = in_turn(raw(OK), status(500))
    before = read_counter("success"), read_counter("failure")
    for _ in range(3):
        make_delivery(receiver.url(), command="counted")
        send()
    assert (read_counter("success") - before[0], read_counter("failure") - before[1]) == (1, 2)
    assert "codeq_webhook_pending 2.0" in scrape().decode()
