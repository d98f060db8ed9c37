"""codeQ through its HTTP API, without a client library.

The producer has one connection. The worker has eight in one process; each returns results and gets the next tasks with
`/tasks/exchange`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import driver
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from bench.http import Connection, build_request, connect

PORT = int(driver.STORE.rpartition(":")[2])
CONNECTIONS = 8


async def send(connection: Connection, path: str, token: str, body: object, status: int) -> bytes:
    response = await connection.send(build_request("POST", f"/v1/codeq/tasks{path}", token, body))
    if response.status != status:
        raise SystemExit(f"{path}: status {response.status} instead of {status}: {response.body[:300]!r}")
    return response.body


def produce() -> None:
    token = os.environ["BENCH_PRODUCER"]
    loop = uvloop.new_event_loop()
    connection = loop.run_until_complete(connect(PORT))

    async def enqueue(payload: dict[str, Any]) -> None:
        await send(connection, "", token, {"command": "bench", "payload": payload}, 202)

    async def enqueue_many(payloads: list[dict[str, Any]]) -> None:
        tasks = [{"command": "bench", "payload": payload} for payload in payloads]
        await send(connection, "/batch", token, {"tasks": tasks}, 200)

    driver.serve(driver.answer_with_async(loop.run_until_complete, enqueue, enqueue_many), [])


async def exchange() -> None:
    token = os.environ["BENCH_WORKER"]
    connection = await connect(PORT)
    results: list[dict[str, Any]] = []
    while True:
        body = {"commands": ["bench"], "waitSeconds": 5, "results": results}
        tasks = json.loads(await send(connection, "/exchange", token, body, 200))["tasks"]
        results = [
            {
                "taskId": task["id"],
                "leaseToken": task["leaseToken"],
                "status": "COMPLETED",
                "result": driver.handle(json.loads(task["payload"])),
            }
            for task in tasks
        ]


async def work() -> None:
    loop = asyncio.get_running_loop()
    workers = asyncio.gather(*(exchange() for _ in range(CONNECTIONS)))
    loop.add_signal_handler(signal.SIGTERM, workers.cancel)
    try:
        await workers
    except asyncio.CancelledError:
        sys.exit(0)


if __name__ == "__main__":
    if driver.is_worker():
        uvloop.run(work())
    else:
        produce()
