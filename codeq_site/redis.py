"""The one place that opens connections to Redis."""

from __future__ import annotations

from functools import cache

import redis
import redis.asyncio

from codeq_site.conf import conf
from codeq_site.errors import ConfigError
from queues.engine import Engine, Options
from queues.engine.keys import PARTITIONS
from queues.engine.pipe import Pipe
from queues.engine.runner import AsyncRunner, SyncRunner


@cache
def client() -> redis.Redis:
    """The sync client of this process: Celery, the console, commands."""
    return redis.Redis.from_url(
        conf().redis_url, socket_timeout=conf().web.redis_timeout_seconds, health_check_interval=30
    )


def async_client() -> redis.asyncio.Redis:
    """A new asyncio client, for the event loop that asks."""
    return redis.asyncio.Redis.from_url(conf().redis_url, health_check_interval=30)


@cache
def engine() -> Engine:
    """The engine of this process. Its awaits belong to the one event loop a web process has."""
    pipe = Pipe(conf().redis_url, timeout_seconds=conf().web.redis_timeout_seconds)
    runner = AsyncRunner(pipe.send, SyncRunner(client()))
    queues = conf().queues
    return Engine(
        runner,
        Options(
            partitions=queues.partitions,
            max_attempts=queues.max_attempts,
            inspect_limit=queues.inspect_limit,
            backoff=queues.backoff,
            backoff_base_ms=round(queues.backoff_base_seconds * 1000),
            backoff_cap_ms=round(queues.backoff_cap_seconds * 1000),
            retention_ms=queues.retention_seconds * 1000,
            dead_retention_ms=queues.dead_retention_seconds * 1000,
            horizon_ms=queues.horizon_seconds * 1000,
        ),
    )


def settle_partitions(store: redis.Redis) -> None:
    """Fix the number of partitions at first start; refuse to start with another one than the data was written with.

    Whoever is first decides, of any number of processes that start at once.
    """
    wanted = conf().queues.partitions
    store.set(PARTITIONS, wanted, nx=True)
    found = int(store.get(PARTITIONS) or 0)
    if found != wanted:
        raise ConfigError(
            f"This Redis was set up with {found} partitions, the settings say {wanted}. "
            f"Set CODEQ_PARTITIONS={found}, or start with an empty Redis."
        )
