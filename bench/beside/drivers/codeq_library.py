"""codeQ through `codeq_client`: one process with 16 slots."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from codeq_client import Client, Job, NewTask, Worker


def work() -> None:
    worker = Worker(driver.STORE, os.environ["BENCH_WORKER"], slots=16)

    @worker.on("bench")
    def handle(job: Job) -> dict[str, bool]:
        return driver.handle(job.payload)

    worker.run()


def produce() -> None:
    with Client(driver.STORE, os.environ["BENCH_PRODUCER"]) as client:

        def enqueue_many(payloads: list[dict[str, Any]]) -> None:
            for made in client.enqueue_many([NewTask(command="bench", payload=payload) for payload in payloads]):
                if isinstance(made, Exception):
                    raise made

        driver.serve(
            driver.answer_with(lambda payload: client.enqueue("bench", payload), enqueue_many), ["httpx", "msgspec"]
        )


if __name__ == "__main__":
    if driver.is_worker():
        work()
    else:
        produce()
