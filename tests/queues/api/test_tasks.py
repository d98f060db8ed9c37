"""Tasks of producers: enqueued alone and in batches, read, cancelled."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from core.redis.connections import client
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import NORTH, TASKS, Configure
from tests.queues.api.tasks import enqueue_task
from tests.waiting import until_async

TRACE_PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.spec("ENQ-1", "A task is enqueued, claimed and completed, and it and its result can be read")
async def test_task_is_enqueued_claimed_and_completed(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer, payload={"n": 1}, priority=3)
    assert task["payload"] == '{"n":1}'
    assert (task["status"], task["priority"], task["tenantId"]) == ("PENDING", 3, NORTH)
    assert task["lastKnownLocation"] == "PENDING_LIST"

    claimed = await worker.post(f"{TASKS}/claim", {"commands": ["RENDER"], "leaseSeconds": 60})
    assert claimed.status == 200, claimed.body
    assert claimed.json["id"] == task["id"]
    assert claimed.json["workerId"] == "worker-1"
    assert claimed.json["leaseToken"]

    beat = await worker.post(f"{TASKS}/{task['id']}/heartbeat", {"extendSeconds": 60})
    assert (beat.status, beat.json["ok"]) == (200, True)

    done = await worker.post(f"{TASKS}/{task['id']}/result", {"status": "COMPLETED", "result": {"ok": True}})
    assert done.status == 200, done.body
    assert done.json["result"] == {"ok": True}

    read = await producer.get(f"{TASKS}/{task['id']}/result")
    assert read.status == 200, read.body
    assert read.json["result"] == done.json
    assert read.json["task"]["status"] == "COMPLETED"
    assert read.json["task"]["resultKey"] == f"/v1/codeq/tasks/{task['id']}/result"
    assert (await producer.get(f"{TASKS}/{task['id']}")).json == read.json["task"]
    assert (await worker.post(f"{TASKS}/claim", {})).status == 204


@pytest.mark.spec("ENQ-1", "The response to an enqueue has every field of the contract, including times")
async def test_task_has_the_requested_fields(producer: Client) -> None:
    task = await enqueue_task(
        producer, priority=9, maxAttempts=7, webhook="https://example.org/hook", idempotencyKey="k-1", payload=[1]
    )
    assert set(task) == {
        "id", "command", "payload", "priority", "status", "attempts", "maxAttempts", "webhook", "tenantId",
        "createdAt", "updatedAt", "lastKnownLocation",
    }  # fmt: skip
    assert (task["maxAttempts"], task["webhook"], task["attempts"]) == (7, "https://example.org/hook", 0)
    created = datetime.fromisoformat(task["createdAt"])
    assert task["createdAt"].endswith("Z")
    assert abs(datetime.now(UTC) - created) < timedelta(seconds=30)
    assert task["createdAt"] == task["updatedAt"]


PAYLOADS = {
    "spaces go": ('{ "a" : [ 1 , 2 ] }', '{"a":[1,2]}'),
    "decimals stay": ("1.10", "1.10"),
    "past 2^53": ("9007199254740993", "9007199254740993"),
    "five thousand digits": ("9" * 5000, "9" * 5000),
    "beyond a double": ("1e400", "1e400"),
    "minus zero": ("-0", "-0"),
    "an empty list": ("[]", "[]"),
    "false": ("false", "false"),
    "an empty text": ('""', '""'),
    "the same key twice": ('{"a":1,"a":2}', '{"a":1,"a":2}'),
    "escapes": (r'"\u0000\u00e9\/\ud83d\ude00"', r'"\u0000\u00e9\/\ud83d\ude00"'),
    "other scripts": ('{"ключ":"値 \U0001f600"}', '{"ключ":"値 \U0001f600"}'),
    "a hundred levels": ("[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
    "wide, not deep": ("[" + "[{}]," * 300 + "0]", "[" + "[{}]," * 300 + "0]"),
    "brackets in a text": ('"' + "[" * 500 + r"\"[[" + '"', '"' + "[" * 500 + r"\"[[" + '"'),
}


@pytest.mark.spec("ENQ-1", "The payload is stored byte for byte, without white space between values")
@pytest.mark.parametrize(("sent", "kept"), PAYLOADS.values(), ids=PAYLOADS.keys())
async def test_payload_is_stored_unchanged(producer: Client, worker: Client, sent: str, kept: str) -> None:
    body = b'{"command":"RENDER","payload": ' + sent.encode() + b" }"
    response = await producer.post(TASKS, body)
    assert response.status == 202, response.body
    assert response.json["payload"] == kept
    assert (await worker.post(f"{TASKS}/claim")).json["payload"] == kept


@pytest.mark.spec("SCH-1", "A task with a delay or a future time is not claimed earlier")
@pytest.mark.parametrize("later", ["delaySeconds", "runAt", "both"])
async def test_delayed_task_has_its_time(producer: Client, worker: Client, later: str) -> None:
    moment = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    fields: dict[str, Any] = {"delaySeconds": 100} if later == "delaySeconds" else {"runAt": moment}
    if later == "both":
        fields["delaySeconds"] = 5
    task = await enqueue_task(producer, **fields)
    assert (task["status"], task["lastKnownLocation"]) == ("PENDING", "DELAYED_ZSET")
    ahead = datetime.fromisoformat(task["visibleAt"]) - datetime.now(UTC)
    assert timedelta(seconds=90) < ahead <= timedelta(seconds=101)
    assert (await worker.post(f"{TASKS}/claim")).status == 204


@pytest.mark.parametrize("moment", ["2001-01-01T00:00:00Z", "1970-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00"])
async def test_past_time_means_now(producer: Client, worker: Client, moment: str) -> None:
    task = await enqueue_task(producer, runAt=moment)
    assert "visibleAt" not in task
    assert (await worker.post(f"{TASKS}/claim")).json["id"] == task["id"]


@pytest.mark.spec("IDM-1", "The same key returns the same task, and a header marks the repeat")
async def test_repeated_key_returns_the_same_task(producer: Client, stranger: Client) -> None:
    body = {"command": "RENDER", "payload": {"a": 1}, "idempotencyKey": "job 1"}
    first = await producer.post(TASKS, body)
    assert "idempotency-replayed" not in first.headers
    again = await producer.post(TASKS, body)
    assert (again.status, again.json) == (202, first.json)
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-mismatch" not in again.headers
    other = await producer.post(TASKS, body | {"payload": {"a": 2}})
    assert (other.status, other.json["id"]) == (202, first.json["id"])
    assert (other.headers["idempotency-replayed"], other.headers["idempotency-mismatch"]) == ("true", "true")
    foreign = await stranger.post(TASKS, body)
    assert foreign.json["id"] != first.json["id"]


async def test_strict_tenant_refuses_a_key_with_another_body(producer: Client, configure_tenant: Configure) -> None:
    configure_tenant(is_idempotency_strict=True)
    await enqueue_task(producer, idempotencyKey="k", payload=1)
    other = await producer.post(TASKS, {"command": "RENDER", "payload": 2, "idempotencyKey": "k"})
    assert (other.status, other.code) == (409, "idempotency_mismatch")


@pytest.mark.spec("IDM-1", "A hundred concurrent identical requests create one task")
async def test_concurrent_requests_with_one_key_create_one_task(producer: Client) -> None:
    body = {"command": "RENDER", "payload": {}, "idempotencyKey": "race"}
    responses = await asyncio.gather(*(producer.post(TASKS, body) for _ in range(100)))
    assert {response.status for response in responses} == {202}
    assert len({response.json["id"] for response in responses}) == 1
    assert sum("idempotency-replayed" not in response.headers for response in responses) == 1


@pytest.mark.spec("ENQ-3", "The items of a batch are independent, and answered in order")
async def test_a_batch_of_independent_tasks(producer: Client) -> None:
    items = (
        b'{"command":"A","payload":1,"idempotencyKey":"k"}',
        b'{"command":"RENDER","payload":' + b"[" * 101 + b"]" * 101 + b"}",
        b'{"command":"B","payload":2,"priority":4}',
        b'{"command":"RENDER","payload":null}',
        b'{"command":"A","payload":1,"idempotencyKey":"k"}',
    )
    body = b'{"tasks":[' + b",".join(items) + b"]}"
    response = await producer.post(f"{TASKS}/batch", body)
    assert response.status == 200, response.body
    first, second, third, fourth, fifth = response.json["results"]
    assert (first["task"]["command"], third["task"]["priority"]) == ("A", 4)
    assert (second["error"], second["status"]) == ("invalid_request", 400)
    assert "100 levels" in second["detail"]
    assert fourth["error"] == "invalid_request"
    assert (fifth["task"]["id"], fifth["isReplayed"]) == (first["task"]["id"], True)


async def test_large_payload_does_not_fail_its_batch(producer: Client, configure_tenant: Configure) -> None:
    configure_tenant(payload_bytes=10)
    tasks = [{"command": "A", "payload": "x" * 9}, {"command": "A", "payload": "x"}]
    large, small = (await producer.post(f"{TASKS}/batch", {"tasks": tasks})).json["results"]
    assert (large["error"], large["status"]) == ("payload_too_large", 413)
    assert small["task"]["status"] == "PENDING"
    single = await producer.post(TASKS, tasks[0])
    assert (single.status, single.code) == (413, "payload_too_large")


@pytest.mark.parametrize("count", [0, 101])
async def test_invalid_batch_is_refused(producer: Client, count: int) -> None:
    response = await producer.post(f"{TASKS}/batch", {"tasks": [{"command": "A", "payload": 1}] * count})
    assert (response.status, response.code) == (400, "invalid_request")
    assert "tasks" in response.json["detail"]


@pytest.mark.spec("ENQ-4", "The trace context of the request is stored with the task and returned to its worker")
async def test_trace_context_stays_with_the_task(producer: Client, worker: Client) -> None:
    headers = {"traceparent": TRACE_PARENT, "tracestate": "a=1,b=2"}
    response = await producer.post(TASKS, {"command": "RENDER", "payload": {}}, headers=headers)
    assert (response.json["traceParent"], response.json["traceState"]) == (TRACE_PARENT, "a=1,b=2")
    claimed = (await worker.post(f"{TASKS}/claim")).json
    assert (claimed["traceParent"], claimed["traceState"]) == (TRACE_PARENT, "a=1,b=2")


@pytest.mark.parametrize(
    "parent",
    [
        "nonsense",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        TRACE_PARENT.replace("00-", "ff-", 1),
        TRACE_PARENT.upper(),
        TRACE_PARENT + "-x",
        "é" * 55,
        "x" * 10_000,
    ],
)
async def test_malformed_trace_is_ignored(producer: Client, parent: str) -> None:
    headers = {"traceparent": parent, "tracestate": "x" * 10_000}
    response = await producer.post(TASKS, {"command": "RENDER", "payload": {}}, headers=headers)
    assert response.status == 202
    assert "traceParent" not in response.json
    assert "traceState" not in response.json


@pytest.mark.spec("TEN-2", "A body can set neither the tenant nor the id of a task")
@pytest.mark.parametrize("field", ["tenantId", "status", "id", "attempts", "tid", "createdAt", "workerId"])
async def test_body_cannot_set_internal_fields(producer: Client, field: str) -> None:
    response = await producer.post(TASKS, {"command": "RENDER", "payload": {}, field: "x"})
    assert response.status == 400
    assert field in response.json["detail"]


@pytest.mark.spec("ACK-5", "A cancelled task ends, is not claimed, and its worker's heartbeat fails")
async def test_cancelling_a_waiting_and_a_running_task(producer: Client, worker: Client) -> None:
    waiting = await enqueue_task(producer)
    cancelled = await producer.delete(f"{TASKS}/{waiting['id']}")
    assert (cancelled.status, cancelled.json["status"]) == (200, "CANCELLED")
    assert (await producer.delete(f"{TASKS}/{waiting['id']}")).json == cancelled.json
    assert (await worker.post(f"{TASKS}/claim")).status == 204

    running = await enqueue_task(producer)
    await worker.post(f"{TASKS}/claim")
    assert (await producer.delete(f"{TASKS}/{running['id']}")).json["status"] == "CANCELLED"
    beat = await worker.post(f"{TASKS}/{running['id']}/heartbeat")
    assert (beat.status, beat.code) == (409, "cancelled")
    late = await worker.post(f"{TASKS}/{running['id']}/result", {"status": "COMPLETED", "result": {}})
    assert (late.status, late.code) == (409, "cancelled")


async def test_an_ended_task_cannot_be_cancelled(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await worker.post(f"{TASKS}/claim")
    await worker.post(f"{TASKS}/{task['id']}/result", {"status": "FAILED", "error": "no"})
    response = await producer.delete(f"{TASKS}/{task['id']}")
    assert (response.status, response.code) == (409, "already_ended")


IDS = ["nonsense", "01920F3E-8D5A-7C31-9A54-0B6F3C2D1E10", "01920f3e8d5a7c319a540b6f3c2d1e10", "..%2f..", "%00", "*"]


@pytest.mark.parametrize("task_id", [*IDS, "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"])
async def test_invalid_id_is_not_found(producer: Client, worker: Client, task_id: str) -> None:
    for response in (
        await producer.get(f"{TASKS}/{task_id}"),
        await producer.get(f"{TASKS}/{task_id}/result"),
        await producer.delete(f"{TASKS}/{task_id}"),
        await worker.post(f"{TASKS}/{task_id}/heartbeat"),
        await worker.post(f"{TASKS}/{task_id}/nack"),
        await worker.post(f"{TASKS}/{task_id}/abandon"),
        await worker.post(f"{TASKS}/{task_id}/result", {"status": "FAILED", "error": "x"}),
    ):
        assert response.status == 404, response.body


async def test_suspended_tenant_finishes_its_work_and_gets_no_new(
    producer: Client, worker: Client, configure_tenant: Configure
) -> None:
    task = await enqueue_task(producer)
    await enqueue_task(producer)
    await worker.post(f"{TASKS}/claim")
    configure_tenant(is_suspended=True)
    for refused in (
        await producer.post(TASKS, {"command": "A", "payload": 1}),
        await producer.get(f"{TASKS}/{task['id']}"),
        await worker.post(f"{TASKS}/claim"),
    ):
        assert (refused.status, refused.code) == (403, "tenant_suspended")
    assert (await worker.post(f"{TASKS}/{task['id']}/heartbeat")).status == 200
    results = [{"taskId": task["id"], "status": "COMPLETED", "result": {}}]
    exchanged = await worker.post(f"{TASKS}/exchange", {"results": results})
    assert exchanged.status == 200
    assert exchanged.json["results"][0]["result"]["status"] == "COMPLETED"
    assert exchanged.json["tasks"] == []


async def test_full_store_refuses_new_tasks_with_retry_after(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await worker.post(f"{TASKS}/claim")
    client().config_set("maxmemory", 1)
    try:
        refused = await producer.post(TASKS, {"command": "A", "payload": 1})
        done = await worker.post(f"{TASKS}/{task['id']}/result", {"status": "COMPLETED", "result": {}})
    finally:
        client().config_set("maxmemory", 0)
    assert (refused.status, refused.code) == (503, "store_full")
    assert int(refused.headers["retry-after"]) == refused.json["retryAfterSeconds"] >= 1
    assert done.status == 200

    async def accepted() -> bool:
        return (await producer.post(TASKS, {"command": "A", "payload": 1})).status == 202

    await until_async(accepted)
