"""The one place that opens connections to Redis: to one server, or to the primaries of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import redis
import redis.asyncio

from core.conf import conf
from core.errors import ConfigError
from core.redis.cluster import ClusterClient, slot_of
from core.redis.partitions import PARTITIONS_KEY, partition_of, partition_root


@cache
def client() -> redis.Redis:
    """The sync client of this process: Celery, the console, commands."""
    timeout = conf().web.redis_timeout_seconds
    if conf().redis_cluster:
        return ClusterClient(conf().redis_url, timeout_seconds=timeout, patience_seconds=timeout)
    return redis.Redis.from_url(conf().redis_url, socket_timeout=timeout, health_check_interval=30)


def async_client() -> redis.asyncio.Redis:
    """A new asyncio client, for the event loop that asks; only to subscribe.

    On a cluster it is one of any node: each of them hears what is published on all, scripts' messages too.
    """
    store = client()
    if isinstance(store, ClusterClient):
        timeout = conf().web.redis_timeout_seconds
        return redis.asyncio.Redis.from_url(store.nodes.url(), socket_connect_timeout=timeout, health_check_interval=30)
    return redis.asyncio.Redis.from_url(conf().redis_url, health_check_interval=30)


def primaries(store: redis.Redis) -> Mapping[str, redis.Redis]:
    """The servers behind a client, by name; one server has none."""
    if not isinstance(store, ClusterClient):
        return {"": store}
    return {f"{address[0]}:{address[1]}": store.nodes.client(address) for address in store.nodes.all()}


def serving_primaries(store: redis.Redis) -> Mapping[str, redis.Redis]:
    """Those of `primaries()` that answer and may serve; one server is not asked."""
    found = primaries(store)
    if not isinstance(store, ClusterClient):
        return found
    there = {f"{host}:{port}" for host, port in store.nodes.there()}
    return {name: server for name, server in found.items() if name in there}


def partition_primary(partition: int) -> redis.Redis:
    """The server whose clock is that of the partition's scripts."""
    store = client()
    if not isinstance(store, ClusterClient):
        return store
    return store.nodes.client(store.nodes.owner(_slot(partition)))


def reachable_partitions() -> Sequence[int]:
    """All of them; on a cluster those whose primary answers. Work on the others waits, and holds up no one else's."""
    every = range(conf().queues.partitions)
    store = client()
    if not isinstance(store, ClusterClient):
        return every
    there = store.nodes.there()
    return [partition for partition in every if store.nodes.known(_slot(partition)) in there]


def reachable_tenants(tids: Iterable[str]) -> list[str]:
    """The tenants of these whose partition is one of `partitions()`."""
    if not isinstance(client(), ClusterClient):
        return list(tids)
    there = set(reachable_partitions())
    return [tid for tid in tids if partition_of(tid, conf().queues.partitions) in there]


def settle_partitions(store: redis.Redis) -> None:
    """Fix the number of partitions at first start; refuse to start with another one than the data was written with.

    Whoever is first decides, of any number of processes that start at once.
    """
    _check_kind(store)
    wanted = conf().queues.partitions
    store.set(PARTITIONS_KEY, wanted, nx=True)
    found = int(store.get(PARTITIONS_KEY) or 0)
    if found != wanted:
        raise ConfigError(
            f"This Redis was set up with {found} partitions, the settings say {wanted}. "
            f"Set CODEQ_PARTITIONS={found}, or start with an empty Redis."
        )


def is_clustered(server: redis.Redis) -> bool:
    """Whether the server is a node of a cluster."""
    return bool(server.info("cluster").get("cluster_enabled"))


def _check_kind(store: redis.Redis) -> None:
    is_wanted = isinstance(store, ClusterClient)
    if is_clustered(store.nodes.any() if isinstance(store, ClusterClient) else store) != is_wanted:
        raise ConfigError(
            "REDIS_URL names a single server: unset CODEQ_REDIS_CLUSTER."
            if is_wanted
            else "REDIS_URL names a node of a Redis Cluster: set CODEQ_REDIS_CLUSTER=true."
        )


def _slot(partition: int) -> int:
    return slot_of(partition_root(partition))
