"""The queue engine of this process, made from the settings."""

from __future__ import annotations

from functools import cache

from core.conf import conf
from core.redis.cluster import ClusterClient
from core.redis.connections import client
from core.redis.multiplexed_cluster import MultiplexedCluster
from core.redis.multiplexed_connection import MultiplexedConnection
from core.redis.runners import AsyncRunner, ClusterRunner, SyncRunner
from queues.engine import Engine, Options


@cache
def engine() -> Engine:
    """Return the engine of this process.

    Await its calls only on the event loop of the web server. Other threads use `run_sync()`.
    """
    store, timeout = client(), conf().web.redis_timeout_seconds
    if isinstance(store, ClusterClient):
        runner = AsyncRunner(MultiplexedCluster(store.topology, timeout_seconds=timeout).send, ClusterRunner(store))
    else:
        runner = AsyncRunner(MultiplexedConnection(conf().redis_url, timeout_seconds=timeout).send, SyncRunner(store))
    queues = conf().queues
    return Engine(
        runner,
        Options(
            partitions=queues.partitions,
            max_attempts=queues.max_attempts,
            repair_limit=queues.repair_limit,
            backoff=queues.backoff,
            backoff_base_ms=round(queues.backoff_base_seconds * 1000),
            backoff_cap_ms=round(queues.backoff_cap_seconds * 1000),
            dead_retention_ms=queues.dead_retention_seconds * 1000,
            horizon_ms=queues.max_schedule_ahead_seconds * 1000,
        ),
    )
