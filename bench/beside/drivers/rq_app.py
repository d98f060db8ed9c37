"""RQ: `work` forks a process for each job, the default.

`work simple` runs the jobs in the worker's process.
"""

from __future__ import annotations

import sys
from typing import Any

import driver
import redis
import rq

NAME = "bench"


def handle(payload: dict[str, Any]) -> dict[str, bool]:
    return driver.handle(payload)


def main() -> None:
    from rq_app import handle  # a job names its function by module, which must not be __main__

    connection = redis.Redis.from_url(driver.STORE)
    queue = rq.Queue(NAME, connection=connection)
    if driver.is_worker():
        worker_class = rq.SimpleWorker if "simple" in sys.argv else rq.Worker
        worker_class([queue], connection=connection).work(logging_level="WARNING")
        return

    def enqueue_many(payloads: list[dict[str, Any]]) -> None:
        queue.enqueue_many([rq.Queue.prepare_data(handle, args=(payload,)) for payload in payloads])

    driver.serve(driver.answer_with(lambda payload: queue.enqueue(handle, payload), enqueue_many), ["rq", "redis"])


if __name__ == "__main__":
    main()
