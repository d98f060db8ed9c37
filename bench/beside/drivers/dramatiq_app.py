"""Dramatiq: a message is acknowledged when its actor has ended, and results are in Redis.

The worker has two processes with eight threads each. Eight is the default; the number of processes is set for two
cores.
"""

from __future__ import annotations

import sys
from typing import Any

import dramatiq
import driver
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

broker = RedisBroker(url=driver.STORE)
broker.add_middleware(Results(backend=RedisBackend(url=driver.STORE)))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def handle(payload: dict[str, Any]) -> dict[str, bool]:
    return driver.handle(payload)


if __name__ == "__main__":
    if driver.is_worker():
        from dramatiq import cli

        sys.argv = ["dramatiq", "dramatiq_app", "--processes", "2", "--threads", "8"]
        sys.exit(cli.main())
    driver.serve(driver.answer_with(handle.send, None), ["dramatiq", "redis"])
