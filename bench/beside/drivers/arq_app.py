"""arq: 50 jobs at once in each process.

A worker polls every 10 ms instead of every 500 ms.
"""

from __future__ import annotations

import asyncio
from typing import Any

import arq
import driver
from arq.connections import RedisSettings


async def handle(context: dict[str, Any], payload: dict[str, Any]) -> dict[str, bool]:
    return driver.handle(payload)


class WorkerSettings:
    """The settings that arq reads."""

    functions = [handle]
    redis_settings = RedisSettings.from_dsn(driver.STORE)
    max_jobs = 50
    poll_delay = 0.01


def main() -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    if driver.is_worker():
        arq.run_worker(WorkerSettings)  # type: ignore[arg-type]
        return
    pool = loop.run_until_complete(arq.create_pool(WorkerSettings.redis_settings))

    async def enqueue(payload: dict[str, Any]) -> None:
        await pool.enqueue_job("handle", payload)

    driver.serve(driver.answer_with_async(loop.run_until_complete, enqueue, None), ["arq", "redis"])


if __name__ == "__main__":
    main()
