"""The part that all drivers share: a producer that reads requests, and the task itself.

A driver is a program with two modes. `produce` reads requests as lines of JSON from stdin and answers each with one
line; its first line gives the versions of the packages. `work` runs the system's worker until SIGTERM. Drivers run in
the environments of their systems, so this module only uses the standard library.

The operations `enqueue` and `enqueue_many` enqueue for a number of seconds and answer with a count. `spaced` enqueues
single tasks at an interval, each with the time of sending, for the measurement of delays.

BENCH_STORE is the URL of the store, and BENCH_DELAYS the file to which `handle` appends delays.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

STORE = os.environ.get("BENCH_STORE", "")
PAYLOAD = {"to": "someone@example.com", "subject": "x" * 100, "n": 12345}
BATCH = 100

Request = dict[str, Any]
Answer = dict[str, Any]


def handle(payload: dict[str, Any]) -> dict[str, bool]:
    """Record the delay if the payload has the time of sending. Otherwise do nothing."""
    if "sent" in payload:
        delay = time.time() - payload["sent"]
        with open(os.environ["BENCH_DELAYS"], "a", encoding="utf-8") as file:
            file.write(f"{delay}\n")
    return {"ok": True}


def stamped() -> dict[str, Any]:
    """Return a payload with the present time, for the measurement of delays."""
    return {**PAYLOAD, "sent": time.time()}


def serve(answer: Callable[[Request], Answer], packages: list[str]) -> None:
    """Answer requests until stdin is closed."""
    versions = {package: metadata.version(package) for package in packages}
    print(json.dumps({"versions": versions}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def answer_with(
    enqueue: Callable[[dict[str, Any]], object], enqueue_many: Callable[[list[dict[str, Any]]], object] | None
) -> Callable[[Request], Answer]:
    """Return the function that answers requests.

    `enqueue` and `enqueue_many` return when the tasks are stored.
    """

    def answer(request: Request) -> Answer:
        if request["operation"] == "spaced":
            for number in range(request["count"]):
                if number:
                    time.sleep(request["interval"])
                enqueue(stamped())
            return {}
        count, started = 0, time.perf_counter()
        while (now := time.perf_counter()) - started < request["seconds"]:
            if request["operation"] == "enqueue":
                enqueue(PAYLOAD)
                count += 1
            else:
                assert enqueue_many is not None
                enqueue_many([PAYLOAD] * BATCH)
                count += BATCH
        return {"count": count, "seconds": now - started}

    return answer


def answer_with_async(
    run: Callable[[Awaitable[Answer]], Answer],
    enqueue: Callable[[dict[str, Any]], Awaitable[object]],
    enqueue_many: Callable[[list[dict[str, Any]]], Awaitable[object]] | None,
) -> Callable[[Request], Answer]:
    """Do the same as `answer_with` for an asyncio producer. `run` runs a coroutine on its loop."""

    async def answer(request: Request) -> Answer:
        import asyncio

        if request["operation"] == "spaced":
            for number in range(request["count"]):
                if number:
                    await asyncio.sleep(request["interval"])
                await enqueue(stamped())
            return {}
        count, started = 0, time.perf_counter()
        while (now := time.perf_counter()) - started < request["seconds"]:
            if request["operation"] == "enqueue":
                await enqueue(PAYLOAD)
                count += 1
            else:
                assert enqueue_many is not None
                await enqueue_many([PAYLOAD] * BATCH)
                count += BATCH
        return {"count": count, "seconds": now - started}

    return lambda request: run(answer(request))


def is_worker() -> bool:
    return sys.argv[1] == "work"
