"""The routes of administrators: dead letters, bulk jobs and topics; the search for tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from core import threadpool
from queues import periodic_tasks
from queues.deadletters import bulk_runner
from queues.models import BulkJob
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS, delete_rows
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task

ADMIN = "/v1/codeq/admin"
MakeClient = Callable[..., Client]


@pytest.fixture(autouse=True)
async def _no_rows_left(_registry: None) -> AsyncIterator[None]:
    yield
    await threadpool.run_db(delete_rows)


async def drain_events() -> None:
    await threadpool.run_db(periodic_tasks.run_drain, lambda: True)


async def make_dead_letters(
    producer: Client, worker: Client, count: int = 1, error: str = "disk full", **fields: Any
) -> list[str]:
    """Create dead letters and drain them to the audit. Returns their ids."""
    ids = []
    for _ in range(count):
        task = await enqueue_task(producer, maxAttempts=1, **fields)
        lease = await claim_task(worker, commands=[task["command"]])
        await worker.post(f"{TASKS}/{lease['id']}/nack", {"reason": error})
        ids.append(lease["id"])
    await drain_events()
    return ids


@pytest.mark.spec("ADM-5", "Dead letters are listed, filtered and paged")
async def test_dead_letters_are_listed_filtered_and_paged(
    producer: Client, worker: Client, admin: Client, client: MakeClient
) -> None:
    full = await make_dead_letters(producer, worker, 3, payload={"n": 1})
    (timeout,) = await make_dead_letters(producer, worker, error="connection timeout")
    await make_dead_letters(producer, worker, command="OTHER")
    listed = (await admin.get(f"{ADMIN}/dlq/RENDER")).json
    assert [letter["id"] for letter in listed["deadLetters"]] == [timeout, *reversed(full)]
    assert "cursor" not in listed
    letter = listed["deadLetters"][1]
    assert (letter["error"], letter["deliveries"], letter["workerId"]) == ("disk full", 1, "worker-1")
    assert letter["payloadStart"] == '{"n":1}'
    of_error = (await admin.get(f"{ADMIN}/dlq/RENDER?error=connection+timeout")).json
    assert [letter["id"] for letter in of_error["deadLetters"]] == [timeout]
    first = (await admin.get(f"{ADMIN}/dlq/RENDER?limit=3")).json
    rest = (await admin.get(f"{ADMIN}/dlq/RENDER?limit=3&cursor={first['cursor']}")).json
    assert [letter["id"] for letter in first["deadLetters"] + rest["deadLetters"]] == [timeout, *reversed(full)]
    assert (await admin.get(f"{ADMIN}/dlq/RENDER?olderThan=3600")).json["deadLetters"] == []
    assert len((await admin.get(f"{ADMIN}/dlq/RENDER?olderThan=2999-01-01T00:00:00Z")).json["deadLetters"]) == 4
    assert (await admin.get(f"{ADMIN}/dlq/NEVER")).json == {"deadLetters": []}
    assert (await client("admin", "south-of-the-api-tests").get(f"{ADMIN}/dlq/RENDER")).json == {"deadLetters": []}


INVALID_LIST_QUERIES = [
    "cursor=x", "cursor=%00", "limit=0", "limit=201", "olderThan=x", "olderThan=-1",
    "olderThan=2026-01-01T00:00:00", "olderThan=1e300", "error=", "error=---", "x=1",
]  # fmt: skip


@pytest.mark.parametrize("query", INVALID_LIST_QUERIES)
async def test_invalid_query_for_dead_letters_is_refused(admin: Client, query: str) -> None:
    response = await admin.get(f"{ADMIN}/dlq/RENDER?{query}")
    assert (response.status, response.code) == (400, "invalid_request")


# PostgreSQL rejects an offset of 16 hours, and the first and last times have no UTC equivalent.
FAR_MOMENTS = [
    "2026-01-01T00:00:00+19:52",
    "2026-01-01T00:00:00-23:59",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
]


@pytest.mark.parametrize("moment", FAR_MOMENTS)
async def test_time_of_any_zone_is_accepted(producer: Client, admin: Client, moment: str) -> None:
    quoted = moment.replace("+", "%2B")
    assert (await producer.get(f"{TASKS}?createdAfter={quoted}")).status == 200
    assert (await admin.get(f"{ADMIN}/dlq/RENDER?olderThan={quoted}")).status == 200
    for name in ("diedAfter", "diedBefore"):
        response = await admin.post(f"{ADMIN}/dlq/RENDER/replay", {"filter": {name: moment}, "dryRun": True})
        assert (response.status, response.json) == (200, {"count": 0, "sample": []})
        job = await admin.post(f"{ADMIN}/dlq/RENDER/replay", {"filter": {name: moment}})
        assert job.status == 202
    await threadpool.run_db(bulk_runner.run, lambda: True, seconds=2)
    assert (await admin.get(job.headers["location"])).json["state"] == "done"
    assert (await admin.post(f"{ADMIN}/tasks/cleanup", {"before": moment})).json["deleted"] == 0


async def test_numbers_of_a_filter_may_be_written_in_several_ways(admin: Client) -> None:
    for number in ("1", "1.0", "10e-1"):
        body = f'{{"filter":{{"deliveriesFrom":{number},"deliveriesTo":{number}}},"dryRun":true}}'
        assert (await admin.post(f"{ADMIN}/dlq/RENDER/replay", body.encode())).status == 200


@pytest.mark.spec("RET-4", "Dead letters are replayed by a bulk job that shows its progress")
async def test_replay_by_filter(producer: Client, worker: Client, admin: Client) -> None:
    ids = await make_dead_letters(producer, worker, 3)
    await make_dead_letters(producer, worker, error="timeout")
    await make_dead_letters(producer, worker, command="OTHER")
    dry = await admin.post(f"{ADMIN}/dlq/RENDER/replay", {"filter": {"error": "disk full"}, "dryRun": True})
    assert (dry.status, dry.json["count"], len(dry.json["sample"])) == (200, 3, 3)
    body = {"filter": {"error": "disk full"}, "ratePerSecond": 1000, "reason": "it is larger now"}
    started = await admin.post(f"{ADMIN}/dlq/RENDER/replay", body)
    assert (started.status, started.json["state"], started.json["done"]) == (202, "running", 0)
    path = started.headers["location"]
    assert path == f"{ADMIN}/bulk/{started.json['id']}"
    await threadpool.run_db(bulk_runner.run, lambda: True, seconds=2)
    job = (await admin.get(path)).json
    assert (job["state"], job["total"], job["done"], job["reason"]) == ("done", 3, 3, "it is larger now")
    claimed_ids = set()
    while (response := await worker.post(f"{TASKS}/claim")).status == 200:
        claimed_ids.add(response.json["id"])
    assert claimed_ids == set(ids)


async def test_replay_by_id_and_cancel(producer: Client, worker: Client, admin: Client) -> None:
    first, second = await make_dead_letters(producer, worker, 2)
    started = await admin.post(f"{ADMIN}/dlq/RENDER/replay", {"ids": [first]})
    assert started.status == 202
    stopped = await admin.delete(started.headers["location"])
    assert (stopped.status, stopped.json["state"]) == (200, "cancelled")
    again = await admin.post(f"{ADMIN}/dlq/RENDER/replay", {"ids": [second]})
    await threadpool.run_db(bulk_runner.run, lambda: True, seconds=2)
    assert (await admin.get(again.headers["location"])).json["done"] == 1
    assert (await claim_task(worker))["id"] == second


@pytest.mark.parametrize(
    "body",
    [
        {"ids": []},
        {"ids": ["x"]},
        {"ids": ["01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"], "filter": {}},
        {"filter": {"command": "OTHER"}},
        {"filter": {"x": 1}},
        {"filter": {"error": "---"}},
        {"filter": {"jsonPath": "$["}},
        {"filter": {"diedAfter": "2026-01-01T00:00:00"}},
        {"ratePerSecond": 0},
        {"dryRun": 1},
        {"reason": "x" * 1001},
    ],
)
async def test_invalid_replay_is_refused(admin: Client, body: dict[str, Any]) -> None:
    response = await admin.post(f"{ADMIN}/dlq/RENDER/replay", body)
    assert (response.status, response.code) == (400, "invalid_request")
    assert await threadpool.run_db(BulkJob.objects.count) == 0


async def test_unknown_bulk_job_is_not_found(admin: Client) -> None:
    for job in ("nonsense", "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10", "%00"):
        for method in ("GET", "DELETE"):
            assert (await admin.request(method, f"{ADMIN}/bulk/{job}")).status == 404


@pytest.mark.spec("ADM-5", "A topic's policy is put, read, listed and deleted; its version counts the changes")
async def test_topic_is_created_changed_and_deleted(admin: Client, client: MakeClient) -> None:
    path = f"{ADMIN}/topics/RENDER"
    assert (await admin.get(path)).status == 404
    policy = {"priorityTiers": [9, 0, 5], "maxAttempts": 3, "maxConsumers": 2, "retentionSeconds": 3600}
    made_new = await admin.request("PUT", path, policy)
    assert (made_new.status, made_new.json["version"]) == (201, 1)
    assert made_new.json["priorityTiers"] == [0, 5, 9]
    same = await admin.request("PUT", path, policy)
    assert (same.status, same.json["version"]) == (200, 1)
    changed = await admin.request("PUT", path, policy | {"maxAttempts": 4, "deadLetterTopicRef": "RENDER_DEAD"})
    assert (changed.status, changed.json["version"], changed.json["deadLetterTopicRef"]) == (200, 2, "RENDER_DEAD")
    assert (await admin.get(path)).json == changed.json
    assert (await admin.get(f"{ADMIN}/topics")).json == {"topics": [changed.json]}
    assert (await client("admin", "south-of-the-api-tests").get(f"{ADMIN}/topics")).json == {"topics": []}
    for query in ("", "?deletionPolicy=", "?deletionPolicy=delete", "?deletionPolicy=Delete&x=1"):
        assert (await admin.delete(path + query)).status == 400
    assert (await admin.delete(f"{path}?deletionPolicy=Delete")).status == 204
    assert (await admin.delete(f"{path}?deletionPolicy=Delete")).status == 404


@pytest.mark.spec("ADM-5", "A topic's policy is enforced")
async def test_topic_policy_is_enforced(producer: Client, worker: Client, admin: Client) -> None:
    await admin.request("PUT", f"{ADMIN}/topics/B", {"priorityTiers": [7, 4]})
    assert (await producer.post(TASKS, {"command": "B", "payload": 1})).json["priority"] == 4
    assert (await producer.post(TASKS, {"command": "B", "payload": 1, "priority": 0})).status == 400
    await admin.request("PUT", f"{ADMIN}/topics/A", {"priorityTiers": [0, 5], "maxAttempts": 2, "maxConsumers": 1})
    refused = await producer.post(TASKS, {"command": "A", "payload": 1, "priority": 3})
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "priority" in refused.json["detail"]
    first = await enqueue_task(producer, command="A", priority=5)
    assert first["maxAttempts"] == 2
    await enqueue_task(producer, command="A")
    await claim_task(worker, commands=["A"])
    assert (await worker.post(f"{TASKS}/claim", {"commands": ["A"]})).status == 204
    await worker.post(f"{TASKS}/{first['id']}/result", COMPLETED)
    await claim_task(worker, commands=["A"])


@pytest.mark.parametrize(
    "body",
    [
        {"priorityTiers": []}, {"priorityTiers": [10]}, {"priorityTiers": [1, 1]}, {"priorityTiers": 3},
        {"maxAttempts": 0}, {"maxAttempts": True}, {"deadLetterTopicRef": "RENDER"}, {"deadLetterTopicRef": "a:b"},
        {"retentionSeconds": 59}, {"maxConsumers": 0}, {"backoff": "random"}, {"backoffBaseSeconds": -1},
        {"version": 7},
    ],
)  # fmt: skip
async def test_invalid_policy_is_refused(admin: Client, body: dict[str, Any]) -> None:
    response = await admin.request("PUT", f"{ADMIN}/topics/RENDER", body)
    assert (response.status, response.code) == (400, "invalid_request")
    assert (await admin.get(f"{ADMIN}/topics")).json == {"topics": []}


async def test_invalid_topic_name_is_refused(admin: Client) -> None:
    response = await admin.request("PUT", f"{ADMIN}/topics/a:b", {})
    assert (response.status, response.code) == (400, "invalid_request")


async def search_all(client: Client, query: str) -> list[dict[str, Any]]:
    """Return the tasks of all pages of a search."""
    tasks: list[dict[str, Any]] = []
    cursor = ""
    for _ in range(100):
        page = (await client.get(f"{TASKS}?{query}{cursor}")).json
        tasks += page["tasks"]
        if "cursor" not in page:
            return tasks
        cursor = f"&cursor={page['cursor']}"
    raise AssertionError("the search has more than 100 pages")


@pytest.mark.spec("ADM-3", "Live and audited tasks are searched by their fields, in pages")
async def test_tasks_are_searched(producer: Client, worker: Client, stranger: Client) -> None:
    done = await enqueue_task(producer, payload={"name": "canary"})
    await claim_task(worker)
    await worker.post(f"{TASKS}/{done['id']}/result", COMPLETED)
    running = await enqueue_task(producer, command="B")
    await claim_task(worker)
    waiting = [await enqueue_task(producer) for _ in range(5)]
    delayed = await enqueue_task(producer, delaySeconds=100, idempotencyKey="the key")
    await drain_events()

    async def ids(query: str) -> set[str]:
        return {task["id"] for task in await search_all(producer, query)}

    live = {task["id"] for task in [*waiting, delayed, running]}
    assert await ids("limit=2") == live | {done["id"]}
    assert await ids("status=COMPLETED") == {done["id"]}
    assert await ids("status=IN_PROGRESS") == {running["id"]}
    assert await ids("status=PENDING&limit=1") == live - {running["id"]}
    assert await ids("command=B") == {running["id"]}
    assert await ids("q=canary") == {done["id"]}
    assert await ids(f"q={delayed['id']}") == {delayed["id"]}
    assert await ids("q=the%20key&status=PENDING") == {delayed["id"]}
    assert await ids("createdAfter=2999-01-01T00:00:00Z") == set()
    assert await ids("createdAfter=2020-01-01T00:00:00Z") == live | {done["id"]}
    assert await search_all(stranger, "limit=50") == []
    assert await search_all(stranger, f"q={delayed['id']}") == []


INVALID_SEARCH_QUERIES = [
    "command=a:b", "status=DONE", "createdAfter=x", "createdAfter=2020-01-01T00:00:00", "q=", "q=%00", "cursor=x",
    "cursor=%00", "limit=0", "limit=x", "x=1", "q=a&q=b",
]  # fmt: skip


@pytest.mark.parametrize("query", INVALID_SEARCH_QUERIES)
async def test_invalid_search_is_refused(producer: Client, query: str) -> None:
    response = await producer.get(f"{TASKS}?{query}")
    assert (response.status, response.code) == (400, "invalid_request")
