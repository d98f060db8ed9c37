"""Every end of a task creates one delivery, in the transaction that audits it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from core.redis.connections import client
from queues import maintenance, periodic_tasks, services
from queues.audit import drain as audit_drain
from queues.audit import stream
from queues.current_engine import engine
from queues.domain import TERMINAL, NewResult, NewTask, TaskStatus
from queues.engine import keys
from queues.models import Attempt, AuditedResult
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tests.factories import EndpointFactory
from tests.webhooks.conftest import Clock, Send
from tests.webhooks.receiver import Receiver
from webhooks.models import Delivery

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
HOOK = "https://example.org/hook?x=1"


@pytest.fixture
def tenant(acme: Tenant) -> TenantSnapshot:
    return TenantSnapshot(tid=acme.tid, slug=acme.slug)


def enqueue(tenant: TenantSnapshot, **fields: Any) -> str:
    new = NewTask(**{"command": "render", "payload": "1", "webhook": HOOK, **fields})
    return services.enqueue(tenant, [new]).run_sync()[0].task.id


def claim(tenant: TenantSnapshot, **options: Any) -> None:
    assert services.claim(tenant, ["render"], "w", **options).run_sync().tasks


def submit(tenant: TenantSnapshot, *task_ids: str, **fields: Any) -> None:
    outcome: dict[str, Any] = fields or {"status": TaskStatus.COMPLETED, "result": b'{"n":1.10}'}
    results = services.submit(tenant, "w", [NewResult(task_id=task_id, **outcome) for task_id in task_ids]).run_sync()
    assert not [result for result in results if isinstance(result, Exception)]


def drain() -> None:
    periodic_tasks.run_drain(lambda: True)


def callback_bodies(task_id: str) -> list[dict[str, Any]]:
    rows = Delivery.objects.filter(task_id=task_id).order_by("created_at", "pk")
    return [json.loads(row.body) for row in rows]


def end_by_result(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant)
    claim(tenant)
    submit(tenant, task_id)
    return task_id


def end_by_failure(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant)
    claim(tenant)
    submit(tenant, task_id, status=TaskStatus.FAILED, error="no luck")
    return task_id


def end_by_batch(tenant: TenantSnapshot) -> str:
    task_ids = [enqueue(tenant, webhook=None), enqueue(tenant), enqueue(tenant, webhook=None)]
    claim(tenant, count=3)
    submit(tenant, *task_ids)
    return task_ids[1]


def end_by_nack(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant, max_attempts=1)
    claim(tenant)
    services.nack(tenant, task_id, "w", reason="no luck").run_sync()
    return task_id


def end_by_abandon(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant, max_attempts=1)
    claim(tenant)
    services.abandon(tenant, task_id, "w").run_sync()
    return task_id


def end_by_expiry(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant, max_attempts=1)
    claim(tenant, lease_seconds=1)
    seconds, _ = client().time()
    engine().clock = lambda: (int(seconds) + 5) * 1000
    try:
        maintenance.repair(lambda: True)
    finally:
        engine().clock = None
    return task_id


def end_by_cancelling_while_waiting(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant)
    services.cancel(tenant, task_id).run_sync()
    return task_id


def end_by_cancelling_while_running(tenant: TenantSnapshot) -> str:
    task_id = enqueue(tenant)
    claim(tenant)
    services.cancel(tenant, task_id).run_sync()
    return task_id


ENDINGS: dict[Callable[[TenantSnapshot], str], tuple[str, str]] = {
    end_by_result: ("COMPLETED", ""),
    end_by_failure: ("FAILED", "no luck"),
    end_by_batch: ("COMPLETED", ""),
    end_by_nack: ("FAILED", "no luck"),
    end_by_abandon: ("FAILED", "MAX_ATTEMPTS"),
    end_by_expiry: ("FAILED", "LEASE_EXPIRED"),
    end_by_cancelling_while_waiting: ("CANCELLED", ""),
    end_by_cancelling_while_running: ("CANCELLED", ""),
}


@pytest.mark.spec("WHK-3", "Every terminal transition creates exactly one delivery")
@pytest.mark.parametrize(("end", "outcome"), ENDINGS.items(), ids=[end.__name__ for end in ENDINGS])
def test_every_end_creates_one_delivery(
    tenant: TenantSnapshot, end: Callable[[TenantSnapshot], str], outcome: tuple[str, str]
) -> None:
    task_id = end(tenant)
    drain()
    drain()
    [body] = callback_bodies(task_id)
    assert (body["status"], body["error"]) == outcome
    assert (body["taskId"], body["eventType"]) == (task_id, "render")
    assert Delivery.objects.count() == 1


@pytest.mark.spec("WHK-3", "A dead letter that is replayed and then completed has two deliveries with two ids")
def test_replayed_dead_letter_has_a_delivery_for_each_end(tenant: TenantSnapshot) -> None:
    task_id = end_by_nack(tenant)
    services.replay(tenant, [task_id]).run_sync()
    claim(tenant)
    submit(tenant, task_id)
    drain()
    # By status, because both events may have the same millisecond.
    bodies = {body["status"]: body for body in callback_bodies(task_id)}
    assert {status: body["result"] for status, body in bodies.items()} == {"FAILED": None, "COMPLETED": {"n": 1.1}}
    assert bodies["FAILED"]["deliveryId"] != bodies["COMPLETED"]["deliveryId"]


@pytest.mark.spec("RET-4", "Replay, undo and purge of a dead letter are events, update its row, and create no delivery")
def test_operations_on_a_dead_letter_create_no_delivery(tenant: TenantSnapshot) -> None:
    task_id = end_by_nack(tenant)
    operations = {
        "REPLAYED": lambda: services.replay_for(tenant, [task_id], "a-job").run_sync(),
        "RECALLED": lambda: services.undo_replay(tenant, [task_id], "a-job").run_sync(),
        "PURGED": lambda: services.purge_dead(tenant, [task_id]).run_sync(),
    }
    drain()
    is_dead = []
    for outcome, operation in operations.items():
        assert operation() == [None]
        [(_, fields)] = client().xrange(keys.of_partition(engine().partition_of(tenant.tid)).events)
        assert (fields[b"outcome"].decode(), fields[b"attempt"]) == (outcome, b"0")
        assert fields[b"status"].decode() not in TERMINAL
        drain()
        is_dead.append(AuditedResult.objects.get().is_dead)
    assert is_dead == [False, True, False]
    assert Attempt.objects.count() == Delivery.objects.count() == 1


def test_body_has_the_documented_fields_and_unchanged_numbers(tenant: TenantSnapshot) -> None:
    task_id = enqueue(tenant)
    claim(tenant)
    submit(
        tenant,
        task_id,
        status=TaskStatus.COMPLETED,
        result=b'{"big":12345678901234567890.10,"lone":"\\ud800"}',
        artifacts=b'[{"name":"a.txt","url":"https://example.org/a"}]',
    )
    drain()
    row = Delivery.objects.get()
    assert '"result":{"big":12345678901234567890.10,"lone":"\\ud800"}' in row.body
    body = json.loads(row.body)
    assert list(body) == [
        "taskId", "eventType", "status", "result", "error", "artifacts", "completedAt", "attempts", "deliveryId",
    ]  # fmt: skip
    assert body["artifacts"][0]["name"] == "a.txt"
    assert body["deliveryId"] == str(row.pk)
    assert body["completedAt"].endswith("Z")
    assert (row.tenant_id, row.address, row.host) == ("acme0001", "https://example.org/hook", "example.org:443")


@pytest.mark.parametrize("result", [b"not json", b"\xff\xfe", b'{"a":', b"[" * 100_000], ids=repr)
def test_invalid_result_json_becomes_a_string(tenant: TenantSnapshot, result: bytes) -> None:
    task_id = enqueue(tenant)
    claim(tenant)
    submit(tenant, task_id, status=TaskStatus.COMPLETED, result=result)
    drain()
    [body] = callback_bodies(task_id)
    assert isinstance(body["result"], str)


def test_task_without_webhook_creates_no_delivery(tenant: TenantSnapshot) -> None:
    task_id = enqueue(tenant, webhook=None)
    claim(tenant)
    submit(tenant, task_id)
    drain()
    assert not Delivery.objects.exists()


def test_refused_url_is_recorded_and_never_sent(tenant: TenantSnapshot, send: Send) -> None:
    """A task has such a URL if it was enqueued before the settings changed."""
    task_id = enqueue(tenant, webhook="http://169.254.169.254/latest/")
    services.cancel(tenant, task_id).run_sync()
    drain()
    row = Delivery.objects.get()
    assert (row.status, row.last_error) == ("given up", "refused: the address is not public")
    sender = send()
    assert (sender.delivered, sender.failed) == (0, 0)


def test_delivery_to_a_disabled_endpoint_is_held(tenant: TenantSnapshot, acme: Tenant) -> None:
    EndpointFactory(tenant=acme, address="https://example.org/hook", is_enabled=False)
    end_by_result(tenant)
    drain()
    assert Delivery.objects.get().status == "held"


@pytest.mark.spec("WHK-3", "An event that is read twice, as after a crash of the drain, creates one delivery")
def test_event_read_twice_creates_one_delivery(tenant: TenantSnapshot) -> None:
    end_by_result(tenant)
    partition = engine().partition_of(tenant.tid)
    stream.survey()
    entries = stream.read({partition: stream.NEW}, 10)
    batch = list(zip(entries, stream.read_blobs(entries), strict=True))
    audit_drain.store(batch)
    Delivery.objects.update(status="delivered")
    audit_drain.store(batch)
    assert Delivery.objects.get().status == "delivered"


@pytest.mark.spec("WHK-3", "A worker's result is drained, and sent to the endpoint with the tenant's signature")
def test_result_reaches_its_endpoint(tenant: TenantSnapshot, receiver: Receiver, send: Send, clock: Clock) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    task_id = enqueue(tenant, webhook=receiver.url(), trace_parent=trace, trace_state="k=v")
    claim(tenant)
    submit(tenant, task_id)
    drain()
    clock.advance(seconds=5)
    assert send().delivered == 1
    [request] = receiver.requests
    assert json.loads(request.body)["result"] == {"n": 1.1}
    assert request.headers["traceparent"] == trace
    assert request.headers["tracestate"] == "k=v"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == json.loads(request.body)["deliveryId"]
    assert Delivery.objects.get().status == "delivered"
