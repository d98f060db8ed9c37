"""Requests for tasks use no query, no thread, and one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper

from core.redis.connections import client as redis_client
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task


async def test_task_is_completed_without_a_query(
    producer: Client, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses: list[str] = []
    await enqueue_task(producer)  # the tokens are cached from here on
    await claim_task(worker)
    monkeypatch.setattr(BaseDatabaseWrapper, "cursor", lambda *args: uses.append("a query"))
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "run_in_executor", lambda *args: uses.append("a thread"))
    task = await enqueue_task(producer, idempotencyKey="k")
    await producer.post(f"{TASKS}/batch", {"tasks": [{"command": "A", "payload": 1}] * 10})
    lease = await claim_task(worker, commands=["RENDER"])
    assert (await worker.post(f"{TASKS}/{task['id']}/heartbeat", {})).status == 200
    assert (await producer.get(f"{TASKS}/{task['id']}")).status == 200
    result = COMPLETED | {"leaseToken": lease["leaseToken"]}
    assert (await worker.post(f"{TASKS}/{task['id']}/result", result)).status == 200
    assert (await producer.get(f"{TASKS}/{task['id']}/result")).status == 200
    claimed = (await worker.post(f"{TASKS}/claim/batch", {})).json["tasks"]
    for verb in ("nack", "abandon"):
        assert (await worker.post(f"{TASKS}/{claimed.pop()['id']}/{verb}", {})).status == 200
    results = [{"taskId": task["id"]} | COMPLETED for task in claimed]
    assert (await worker.post(f"{TASKS}/exchange", {"results": results})).status == 200
    assert uses == []


def count_scripts() -> int:
    stats: dict[str, Any] = redis_client().info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


@pytest.mark.spec("ENQ-2", "One request is one script")
async def test_request_is_one_round_trip(producer: Client, worker: Client) -> None:
    await enqueue_task(producer, command="A")
    await claim_task(worker, commands=["A"])  # scripts are loaded and tokens cached
    for path, client, body in (
        ("", producer, {"command": "A", "payload": 1}),
        ("/batch", producer, {"tasks": [{"command": "A", "payload": 1}] * 100}),
        ("/claim", worker, {"commands": ["A"]}),
        ("/claim/batch", worker, {"commands": ["A", "B"], "count": 10}),
    ):
        before = count_scripts()
        assert (await client.post(TASKS + path, body)).status in (200, 202)
        assert count_scripts() - before == 1, path


@pytest.mark.spec("CLM-1", "Workers whose requests arrive together get a task and a lease each, by one script")
async def test_requests_that_arrive_together_share_a_script(producer: Client, client: Callable[..., Client]) -> None:
    workers = [client("worker", sub=f"worker {number}") for number in range(20)]
    for worker in workers:  # scripts are loaded and tokens cached
        task = await enqueue_task(producer, command="A")
        await claim_task(worker, commands=["A"])
        await worker.post(f"{TASKS}/{task['id']}/result", COMPLETED)

    before = count_scripts()
    tasks = await asyncio.gather(*(enqueue_task(producer, command="A", payload=number) for number in range(20)))
    assert count_scripts() - before == 1
    leases = await asyncio.gather(*(claim_task(worker, commands=["A"]) for worker in workers))
    assert count_scripts() - before == 2
    assert [(lease["id"], lease["workerId"]) for lease in leases] == [
        (task["id"], f"worker {number}") for number, task in enumerate(tasks)
    ]
    leases[7]["leaseToken"] = leases[8]["leaseToken"]
    answers = await asyncio.gather(
        *(
            worker.post(f"{TASKS}/{lease['id']}/result", COMPLETED | {"leaseToken": lease["leaseToken"]})
            for worker, lease in zip(workers, leases, strict=True)
        )
    )
    assert count_scripts() - before == 3
    assert [answer.status for answer in answers] == [200] * 7 + [409] + [200] * 12
