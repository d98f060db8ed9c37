"""Workers: claims, heartbeats, returned tasks, results."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from queues import selectors
from queues.api import claim_request
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS, Configure
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task
from tests.waiting import until_async

MakeClient = Callable[..., Client]


@pytest.mark.spec("CLM-1", "A claim returns the task, its lease and the lease token")
async def test_a_claim_opens_a_lease(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    mine = await claim_task(worker, leaseSeconds=100)
    assert (mine["id"], mine["status"], mine["workerId"]) == (task["id"], "IN_PROGRESS", "worker-1")
    assert len(mine["leaseToken"]) == 32
    left = datetime.fromisoformat(mine["leaseUntil"]) - datetime.now(UTC)
    assert timedelta(seconds=90) < left <= timedelta(seconds=101)
    read = (await producer.get(f"{TASKS}/{task['id']}")).json
    assert "leaseToken" not in read
    assert (read["leaseUntil"], read["lastKnownLocation"]) == (mine["leaseUntil"], "INPROG_SET")


@pytest.mark.spec("CLM-2", "A worker gets only tasks that its token's eventTypes allow")
async def test_a_claim_is_limited_to_the_tokens_commands(producer: Client, client: MakeClient) -> None:
    for command in ("A", "B"):
        await enqueue_task(producer, command=command)
    only_b = client("worker", eventTypes=["B", "C"])
    refused = await only_b.post(f"{TASKS}/claim", {"commands": ["B", "A"]})
    assert (refused.status, refused.code) == (403, "forbidden")
    assert (await claim_task(only_b))["command"] == "B"
    assert (await only_b.post(f"{TASKS}/claim")).status == 204
    nothing = client("worker", eventTypes=[])
    assert (await nothing.post(f"{TASKS}/claim")).status == 403
    everything = client("worker", eventTypes=["*"])
    assert (await claim_task(everything))["command"] == "A"


async def test_with_a_star_and_no_command_every_queue_is_claimed(producer: Client, worker: Client) -> None:
    assert (await worker.post(f"{TASKS}/claim")).status == 204
    commands = [f"C{number}" for number in range(150)]
    for start in (0, 75):
        tasks = [{"command": command, "payload": 1} for command in commands[start : start + 75]]
        await producer.post(f"{TASKS}/batch", {"tasks": tasks})
    claimed_commands = set()
    while (response := await worker.post(f"{TASKS}/claim/batch")).status == 200:
        claimed_commands |= {task["command"] for task in response.json["tasks"]}
    assert claimed_commands == set(commands)


@pytest.mark.spec("TEN-3", "Claims from all queues of a tenant use a cached list of their names")
async def test_claims_from_all_queues_use_a_cached_list_of_names(
    producer: Client, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read_queues = selectors.queues
    monkeypatch.setattr(selectors, "queues", lambda tenant: reads.append(tenant.tid) or read_queues(tenant))
    monkeypatch.setattr(claim_request, "_queue_names", claim_request.QueueNames())
    monkeypatch.setattr(claim_request, "CACHE_SECONDS", 60.0)
    for start in (0, 75):
        tasks = [{"command": f"D{number}", "payload": 1} for number in range(start, start + 75)]
        await producer.post(f"{TASKS}/batch", {"tasks": tasks})
    for _ in range(20):
        assert (await worker.post(f"{TASKS}/claim")).status == 200
    assert len(reads) == 1


@pytest.mark.spec("CLM-3", "204 without a body if there is no task")
async def test_an_empty_queue_answers_204(worker: Client) -> None:
    response = await worker.post(f"{TASKS}/claim", {"commands": ["NOTHING"]})
    assert (response.status, response.body) == (204, b"")
    assert "content-length" not in response.headers
    assert (await worker.post(f"{TASKS}/claim/batch", {"count": 3})).status == 204


@pytest.mark.spec("CLM-3", "A batch claim takes up to `count` tasks, the highest priority first")
async def test_a_batch_claim_takes_the_best_first(producer: Client, worker: Client) -> None:
    tasks = [{"command": "A", "payload": number, "priority": number % 3} for number in range(6)]
    await producer.post(f"{TASKS}/batch", {"tasks": tasks})
    first = (await worker.post(f"{TASKS}/claim/batch", {"count": 4})).json["tasks"]
    assert [task["payload"] for task in first] == ["2", "5", "1", "4"]
    assert [task["payload"] for task in (await worker.post(f"{TASKS}/claim/batch")).json["tasks"]] == ["0", "3"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("claim", {"leaseSeconds": 0}),
        ("claim", {"leaseSeconds": 43_201}),
        ("claim", {"leaseSeconds": 1e9}),
        ("claim", {"leaseSeconds": 1.5}),
        ("claim", {"leaseSeconds": True}),
        ("claim", {"waitSeconds": -1}),
        ("claim", {"waitSeconds": 31}),
        ("claim", {"waitSeconds": "5"}),
        ("claim", {"commands": "A"}),
        ("claim", {"commands": ["A:B"]}),
        ("claim", {"commands": ["A\n"]}),
        ("claim", {"commands": ["A"] * 101}),
        ("claim", {"count": 2}),
        ("claim/batch", {"count": 0}),
        ("claim/batch", {"count": 11}),
        ("claim/batch", {"count": 1e9}),
        ("claim/batch", {"count": True}),
    ],
)
async def test_invalid_claim_is_refused(worker: Client, path: str, fields: dict[str, Any]) -> None:
    response = await worker.post(f"{TASKS}/{path}", fields)
    assert (response.status, response.code) == (400, "invalid_request")
    assert next(iter(fields)) in response.json["detail"]


@pytest.mark.spec("CLM-6", "A heartbeat extends the lease and stores the progress")
async def test_a_heartbeat_extends_the_lease(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker, leaseSeconds=5)
    fields = {"extendSeconds": 1000, "progress": {"percent": 40, "note": "frame 96"}}
    beat = await worker.post(f"{TASKS}/{task['id']}/heartbeat", fields)
    assert beat.json["ok"] is True
    left = datetime.fromisoformat(beat.json["leaseUntil"]) - datetime.now(UTC)
    assert timedelta(seconds=990) < left <= timedelta(seconds=1001)
    read = (await producer.get(f"{TASKS}/{task['id']}")).json
    assert (read["leaseUntil"], read["progress"]) == (beat.json["leaseUntil"], {"percent": 40, "note": "frame 96"})
    await worker.post(f"{TASKS}/{task['id']}/heartbeat", {"progress": 55.5})
    assert (await producer.get(f"{TASKS}/{task['id']}")).json["progress"] == {"percent": 55.5}


@pytest.mark.spec("CLM-7", "An expired lease cannot be extended, completed or returned by its former holder")
async def test_an_expired_lease_is_refused_everywhere(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    lease = await claim_task(worker, leaseSeconds=1)
    until = datetime.fromisoformat(lease["leaseUntil"]).timestamp()

    async def over() -> bool:
        return time.time() > until + 0.05

    await until_async(over)
    for verb, body in (("heartbeat", {}), ("nack", {}), ("abandon", {}), ("result", COMPLETED)):
        response = await worker.post(f"{TASKS}/{task['id']}/{verb}", body | {"leaseToken": lease["leaseToken"]})
        assert (response.status, response.code) == (409, "lease_lost"), verb


HOLDER_VERBS = {"heartbeat": {}, "nack": {}, "abandon": {}, "result": COMPLETED}


@pytest.mark.spec("CLM-7", "Only the holder of a lease is accepted, and only with the token of that lease")
@pytest.mark.parametrize(("verb", "body"), HOLDER_VERBS.items(), ids=HOLDER_VERBS.keys())
async def test_only_the_holder_of_the_lease_is_accepted(
    producer: Client, worker: Client, other_worker: Client, verb: str, body: dict[str, Any]
) -> None:
    task = await enqueue_task(producer)
    path = f"{TASKS}/{task['id']}/{verb}"
    never = await worker.post(path, body)
    assert (never.status, never.code) == (409, "lease_lost")
    lease = await claim_task(worker)
    other = await other_worker.post(path, body)
    assert (other.status, other.code) == (403, "not_owner")
    other_token = await other_worker.post(path, body | {"leaseToken": lease["leaseToken"]})
    assert other_token.status == 403
    wrong = await worker.post(path, body | {"leaseToken": "0" * 32})
    assert (wrong.status, wrong.code) == (409, "lease_lost")
    header = {"X-CodeQ-Lease-Token": "0" * 32}
    assert (await worker.post(path, body, headers=header)).status == 409
    different_tokens = await worker.post(path, body | {"leaseToken": lease["leaseToken"]}, headers=header)
    assert (different_tokens.status, different_tokens.code) == (409, "lease_lost")
    right = await worker.post(path, body, headers={"X-CodeQ-Lease-Token": lease["leaseToken"]})
    assert right.status == 200


async def test_a_tenant_may_require_the_lease_token(
    producer: Client, worker: Client, configure_tenant: Configure
) -> None:
    configure_tenant(is_lease_token_required=True)
    task = await enqueue_task(producer)
    lease = await claim_task(worker)
    without = await worker.post(f"{TASKS}/{task['id']}/heartbeat")
    assert (without.status, without.code) == (400, "invalid_request")
    assert (await worker.post(f"{TASKS}/{task['id']}/heartbeat", {"leaseToken": lease["leaseToken"]})).status == 200


@pytest.mark.spec("RET-1", "A nack delays the task; after the last attempt it becomes a dead letter")
@pytest.mark.spec("RET-2", "`delaySeconds` overrides the backoff, up to its cap")
async def test_nack_delays_and_then_makes_a_dead_letter(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer, maxAttempts=2)
    path = f"{TASKS}/{task['id']}"
    await claim_task(worker)
    first = await worker.post(f"{path}/nack", {"delaySeconds": 0, "reason": "disk full"})
    assert (first.status, first.json) == (200, {"status": "requeued", "delaySeconds": 0})
    again = await claim_task(worker)
    assert (again["attempts"], again["error"]) == (1, "disk full")
    second = await worker.post(f"{path}/nack", {"reason": "still full"})
    assert second.json == {"status": "dlq", "delaySeconds": 0}
    dead = (await producer.get(path)).json
    assert (dead["status"], dead["error"], dead["attempts"]) == ("FAILED", "still full", 2)
    assert dead["lastKnownLocation"] == "DLQ_SET"
    assert "resultKey" not in dead


async def test_a_nacks_delay_is_capped(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    response = await worker.post(f"{TASKS}/{task['id']}/nack", b'{"delaySeconds": 1e300}')
    assert response.json == {"status": "requeued", "delaySeconds": 900}


@pytest.mark.spec("RET-3", "An abandoned task is ready at once, last of its priority; the attempt counts")
async def test_abandoned_task_is_ready_at_once(producer: Client, worker: Client) -> None:
    first, second = await enqueue_task(producer, maxAttempts=2), await enqueue_task(producer)
    assert (await claim_task(worker))["id"] == first["id"]
    response = await worker.post(f"{TASKS}/{first['id']}/abandon")
    assert (response.status, response.json) == (200, {"status": "requeued"})
    assert (await claim_task(worker))["id"] == second["id"]
    again = await claim_task(worker)
    assert (again["id"], again["attempts"]) == (first["id"], 1)
    assert (await worker.post(f"{TASKS}/{first['id']}/abandon")).json == {"status": "dlq"}


@pytest.mark.spec("ACK-1", "COMPLETED needs a result, an object; FAILED needs an error")
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"status": "COMPLETED"}, "result"),
        ({"status": "COMPLETED", "result": None}, "result"),
        ({"status": "COMPLETED", "result": [1]}, "result"),
        ({"status": "COMPLETED", "result": "x"}, "result"),
        ({"status": "COMPLETED", "error": "x"}, "result"),
        ({"status": "FAILED"}, "error"),
        ({"status": "FAILED", "error": ""}, "error"),
        ({"status": "FAILED", "error": "a\0b"}, "error"),
        ({"status": "CANCELLED", "result": {}}, "status"),
        ({"status": "completed", "result": {}}, "status"),
        ({"result": {}}, "status"),
    ],
)
async def test_result_must_match_its_status(producer: Client, worker: Client, body: Any, named: str) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    response = await worker.post(f"{TASKS}/{task['id']}/result", body)
    assert (response.status, response.code) == (400, "invalid_request")
    assert named in response.json["detail"]
    assert (await producer.get(f"{TASKS}/{task['id']}")).json["status"] == "IN_PROGRESS"


@pytest.mark.spec("ACK-3", "A repeated submission gets the same answer; a different one is refused and changes nothing")
async def test_repeated_submission_changes_nothing(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    lease = await claim_task(worker)
    path = f"{TASKS}/{task['id']}/result"
    body = COMPLETED | {"leaseToken": lease["leaseToken"]}
    first = await worker.post(path, body)
    spaced = b'{"leaseToken":"%s","result" : { "ok":true },"status":"COMPLETED"}' % lease["leaseToken"].encode()
    for again in (body, spaced, body | {"workerId": "somebody else"}):
        response = await worker.post(path, again)
        assert (response.status, response.json) == (200, first.json)
    for other in (body | {"result": {"ok": False}}, {"status": "FAILED", "error": "x"}):
        response = await worker.post(path, other)
        assert (response.status, response.code) == (409, "already_ended")
    assert (await producer.get(path)).json["result"] == first.json


@pytest.mark.spec("ACK-1", "A failed task keeps its error as its result")
async def test_failed_task_has_a_result(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    response = await worker.post(f"{TASKS}/{task['id']}/result", {"status": "FAILED", "error": "out of colour"})
    assert (response.json["status"], response.json["error"], response.json["attempts"]) == (
        "FAILED",
        "out of colour",
        1,
    )
    read = (await worker.get(f"{TASKS}/{task['id']}/result")).json
    assert read["result"] == response.json
    assert read["task"]["error"] == "out of colour"


async def test_result_is_stored_unchanged(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    body = rb'{"status":"COMPLETED","result":{ "n":1.10,"big":9007199254740993,"e":1e400,"s":"\u0000" }}'
    response = await worker.post(f"{TASKS}/{task['id']}/result", body)
    assert rb'"result":{"n":1.10,"big":9007199254740993,"e":1e400,"s":"\u0000"}' in response.body
    read = await producer.get(f"{TASKS}/{task['id']}/result")
    assert rb'"result":{"n":1.10,"big":9007199254740993,"e":1e400,"s":"\u0000"}' in read.body


async def test_size_of_a_result_is_limited(producer: Client, worker: Client, configure_tenant: Configure) -> None:
    configure_tenant(result_bytes=100)
    task = await enqueue_task(producer)
    await claim_task(worker)
    large = {"status": "COMPLETED", "result": {"x": "y" * 100}}
    response = await worker.post(f"{TASKS}/{task['id']}/result", large)
    assert (response.status, response.code) == (413, "payload_too_large")


@pytest.mark.spec("ACK-6", "The items of a batch of results are independent, and answered in order")
async def test_a_batch_of_results(producer: Client, stranger: Client, worker: Client) -> None:
    mine, two = await enqueue_task(producer), await enqueue_task(producer)
    foreign = (await stranger.post(TASKS, {"command": "A", "payload": 1})).json
    await worker.post(f"{TASKS}/claim/batch")
    results = [
        {"taskId": mine["id"]} | COMPLETED,
        {"taskId": foreign["id"]} | COMPLETED,
        {"taskId": two["id"], "status": "COMPLETED"},
        {"taskId": mine["id"]} | COMPLETED,
        {"taskId": two["id"], "status": "FAILED", "error": "no"},
    ]
    response = await worker.post(f"{TASKS}/batch/results", {"results": results})
    assert response.status == 200, response.body
    items = response.json["results"]
    assert [item["taskId"] for item in items] == [result["taskId"] for result in results]
    assert [item.get("error") for item in items] == [None, "task_not_found", "invalid_request", None, None]
    assert [item.get("status") for item in items] == [None, 404, 400, None, None]
    assert items[0]["result"] == items[3]["result"]
    assert items[4]["result"]["status"] == "FAILED"
    assert (await stranger.get(f"{TASKS}/{foreign['id']}")).json["status"] == "PENDING"


@pytest.mark.parametrize("results", [[], [{"taskId": "nonsense"} | COMPLETED], [COMPLETED], [{"taskId": "x"}] * 101])
async def test_invalid_batch_of_results_is_refused(worker: Client, results: list[Any]) -> None:
    response = await worker.post(f"{TASKS}/batch/results", {"results": results})
    assert (response.status, response.code) == (400, "invalid_request")


async def test_exchange_submits_and_claims(producer: Client, worker: Client) -> None:
    for _ in range(3):
        await enqueue_task(producer)
    first = (await worker.post(f"{TASKS}/exchange", {"count": 2})).json
    assert (first["results"], len(first["tasks"])) == ([], 2)
    results = [{"taskId": task["id"], "leaseToken": task["leaseToken"]} | COMPLETED for task in first["tasks"]]
    second = (await worker.post(f"{TASKS}/exchange", {"results": results, "count": 2})).json
    assert [item["result"]["status"] for item in second["results"]] == ["COMPLETED"] * 2
    assert len(second["tasks"]) == 1
    empty = await worker.post(f"{TASKS}/exchange")
    assert (empty.status, empty.json) == (200, {"results": [], "tasks": []})


async def test_exchange_submits_and_claims_a_hundred_and_a_batch_claim_ten(producer: Client, worker: Client) -> None:
    for _ in range(3):
        await producer.post(f"{TASKS}/batch", {"tasks": [{"command": "A", "payload": {}}] * 100})
    first = (await worker.post(f"{TASKS}/exchange", {"count": 100})).json
    results = [{"taskId": task["id"], "leaseToken": task["leaseToken"]} | COMPLETED for task in first["tasks"]]
    second = (await worker.post(f"{TASKS}/exchange", {"results": results})).json
    assert [item["result"]["status"] for item in second["results"]] == ["COMPLETED"] * 100
    assert len(second["tasks"]) == 100
    assert len((await worker.post(f"{TASKS}/claim/batch")).json["tasks"]) == 10
    for path, count in (("exchange", 101), ("claim/batch", 11)):
        answer = await worker.post(f"{TASKS}/{path}", {"count": count})
        assert (answer.status, answer.code) == (400, "invalid_request")


async def test_exchange_without_the_right_to_claim_submits_nothing(producer: Client, client: MakeClient) -> None:
    task = await enqueue_task(producer, command="A")
    worker = client("worker", eventTypes=["A"])
    await claim_task(worker)
    body = {"results": [{"taskId": task["id"]} | COMPLETED], "commands": ["B"]}
    assert (await worker.post(f"{TASKS}/exchange", body)).status == 403
    assert (await producer.get(f"{TASKS}/{task['id']}")).json["status"] == "IN_PROGRESS"


@pytest.mark.spec("ACK-5", "A running task has no result, nor has a task that ended without one")
async def test_missing_result_differs_from_missing_task(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    path = f"{TASKS}/{task['id']}/result"
    waiting = await producer.get(path)
    assert (waiting.status, waiting.code, waiting.json["detail"]) == (404, "result_not_found", "result not found")
    absent = await producer.get(f"{TASKS}/01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10/result")
    assert (absent.status, absent.code, absent.json["detail"]) == (404, "task_not_found", "task not found")
    await producer.delete(f"{TASKS}/{task['id']}")
    assert (await producer.get(path)).code == "result_not_found"
