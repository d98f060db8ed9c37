"""The connections of a process to Redis: to one server, or to the primaries of a cluster."""

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
    """Return the sync client of this process, for Celery, the console and commands."""
    timeout = conf().web.redis_timeout_seconds
    if conf().redis_cluster:
        return ClusterClient(conf().redis_url, timeout_seconds=timeout, redirect_timeout_seconds=timeout)
    return redis.Redis.from_url(conf().redis_url, socket_timeout=timeout, health_check_interval=30)


def async_client() -> redis.asyncio.Redis:
    """Return a new asyncio client for subscriptions on the current event loop.

    On a cluster it connects to any node: a message that a client or a script publishes reaches all nodes.
    """
    store = client()
    if isinstance(store, ClusterClient):
        timeout = conf().web.redis_timeout_seconds
        return redis.asyncio.Redis.from_url(
            store.topology.url(), socket_connect_timeout=timeout, health_check_interval=30
        )
    return redis.asyncio.Redis.from_url(conf().redis_url, health_check_interval=30)


def primaries(store: redis.Redis) -> Mapping[str, redis.Redis]:
    """Return the servers of a client by name. The name of a single server is empty."""
    if not isinstance(store, ClusterClient):
        return {"": store}
    return {
        f"{address[0]}:{address[1]}": store.topology.client(address) for address in store.topology.discover_primaries()
    }


def serving_primaries(store: redis.Redis) -> Mapping[str, redis.Redis]:
    """Return the primaries that answer and report a working cluster.

    A single server is returned without a check.
    """
    servers = primaries(store)
    if not isinstance(store, ClusterClient):
        return servers
    reachable = {f"{host}:{port}" for host, port in store.topology.reachable()}
    return {name: server for name, server in servers.items() if name in reachable}


def partition_primary(partition: int) -> redis.Redis:
    """Return the server that runs the partition's scripts. They use its clock."""
    store = client()
    if not isinstance(store, ClusterClient):
        return store
    return store.topology.client(store.topology.primary_of(_slot(partition)))


def reachable_partitions() -> Sequence[int]:
    """Return all partitions; on a cluster, those whose primary answers.

    Callers skip the others, so that one primary that is down does not delay the work on the rest.
    """
    partitions = range(conf().queues.partitions)
    store = client()
    if not isinstance(store, ClusterClient):
        return partitions
    topology = store.topology
    reachable = topology.reachable()
    return [partition for partition in partitions if topology.known_primary(_slot(partition)) in reachable]


def reachable_tenants(tids: Iterable[str]) -> list[str]:
    """Return the tenants whose partition is one of `reachable_partitions()`."""
    if not isinstance(client(), ClusterClient):
        return list(tids)
    partitions = set(reachable_partitions())
    return [tid for tid in tids if partition_of(tid, conf().queues.partitions) in partitions]


def settle_partitions(store: redis.Redis) -> None:
    """Store the number of partitions at the first start; later compare it with the settings.

    If several processes start at the same time, the first one to write it decides. Raises ConfigError if the numbers
    differ.
    """
    _check_kind(store)
    configured = conf().queues.partitions
    store.set(PARTITIONS_KEY, configured, nx=True)
    stored = int(store.get(PARTITIONS_KEY) or 0)
    if stored != configured:
        raise ConfigError(
            f"This Redis was set up with {stored} partitions, but the settings have {configured}. "
            f"Set CODEQ_PARTITIONS={stored}, or use an empty Redis."
        )


def is_clustered(server: redis.Redis) -> bool:
    """Whether the server is a node of a cluster."""
    return bool(server.info("cluster").get("cluster_enabled"))


def _check_kind(store: redis.Redis) -> None:
    """Raise ConfigError unless CODEQ_REDIS_CLUSTER matches the kind of the server."""
    cluster = store if isinstance(store, ClusterClient) else None
    if is_clustered(store if cluster is None else cluster.topology.any_node()) != (cluster is not None):
        raise ConfigError(
            "REDIS_URL names a single server: unset CODEQ_REDIS_CLUSTER."
            if cluster is not None
            else "REDIS_URL names a node of a Redis Cluster: set CODEQ_REDIS_CLUSTER=true."
        )


def _slot(partition: int) -> int:
    return slot_of(partition_root(partition))
