"""Enqueue and claim tasks through the API."""

from __future__ import annotations

from typing import Any

from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS

# The body of a submission that completes a task.
COMPLETED = {"status": "COMPLETED", "result": {"ok": True}}


async def enqueue_task(producer: Client, **fields: Any) -> dict[str, Any]:
    response = await producer.post(TASKS, {"command": "RENDER", "payload": {}, **fields})
    assert response.status == 202, response.body
    task: dict[str, Any] = response.json
    return task


async def claim_task(worker: Client, **fields: Any) -> dict[str, Any]:
    response = await worker.post(f"{TASKS}/claim", fields)
    assert response.status == 200, response.body
    task: dict[str, Any] = response.json
    return task
