"""A task's way through the API."""

from __future__ import annotations

import pytest

from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import NORTH, TASKS


@pytest.mark.spec("ENQ-1", "A task goes in, is claimed, ends with a result, and both can be read")
async def test_a_task_goes_all_the_way(producer: Client, worker: Client) -> None:
    made = await producer.post(TASKS, {"command": "RENDER", "payload": {"n": 1.10}, "priority": 3})
    assert made.status == 202, made.body
    task = made.json
    assert task["payload"] == '{"n":1.1}'
    assert (task["status"], task["priority"], task["tenantId"]) == ("PENDING", 3, NORTH)

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
    assert (await producer.get(f"{TASKS}/{task['id']}")).json == read.json["task"]
    assert (await worker.post(f"{TASKS}/claim", {})).status == 204
