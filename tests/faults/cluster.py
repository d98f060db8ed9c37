"""A Redis Cluster of three primaries on the loopback, whose slots can be moved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import redis
from redis.crc import key_slot

from codeq_site.devserver.embedded import DURABLE, Valkey
from core.redis import cluster as clusters
from queues.engine import keys
from tests.conftest import free_port
from tests.waiting import until

SLOTS = 16_384
NODES = 3


class FlushableClient(clusters.ClusterClient):
    """The engine's cluster client with a `flushall` that empties all nodes."""

    def flushall(self, **_: object) -> bool:
        return all(self.topology.client(address).flushall() for address in self.topology.discover_primaries())


class Cluster:
    """Three primaries, and optionally a replica of each."""

    def __init__(self, directory: Path, **config: str) -> None:
        """Start the nodes with this configuration.

        By default, a server calls fsync once per second, not for every write, because the three servers share one disk.
        """
        self.ports = [free_port() for _ in range(NODES)]
        self.servers = [self._build_server(directory / f"{n}", port, config) for n, port in enumerate(self.ports)]
        for server in self.servers:
            server.start()
        self.nodes = [redis.Redis.from_url(server.url) for server in self.servers]
        self.ids = [node.execute_command("CLUSTER", "MYID").decode() for node in self.nodes]
        self.replicas: list[Valkey] = []
        self._connect_nodes()

    @staticmethod
    def _build_server(directory: Path, port: int, config: Mapping[str, str]) -> Valkey:
        directory.mkdir()
        settings = {
            "port": str(port),
            "cluster-enabled": "yes",
            "cluster-port": str(free_port()),
            "cluster-node-timeout": "2000",
            # Partitions on an unreachable node must not stop the others.
            "cluster-require-full-coverage": "no",
            "appendfsync": "everysec",
            "repl-diskless-sync-delay": "0",
            **config,
        }
        return Valkey(directory / "data", directory / "log", directory / "s", {**DURABLE, **settings})

    def _connect_nodes(self) -> None:
        share = SLOTS // NODES
        for n, node in enumerate(self.nodes):
            last = SLOTS - 1 if n == NODES - 1 else (n + 1) * share - 1
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", n * share, last)
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        for server in self.servers[1:]:
            self._meet(server)
        until(lambda: all(self.is_complete(node) for node in self.nodes), 30)

    def _meet(self, server: Valkey) -> None:
        ports = server.config["port"], server.config["cluster-port"]
        self.nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", *ports)

    def is_complete(self, node: redis.Redis) -> bool:
        info = node.execute_command("CLUSTER", "INFO")
        node_count = len(self.servers) + len(self.replicas)
        return b"cluster_state:ok" in info and f"cluster_known_nodes:{node_count}".encode() in info

    def add_replicas(self, directory: Path, **config: str) -> list[redis.Redis]:
        """Add a replica of each primary, and wait until they are in sync."""
        self.replicas = [self._build_server(directory / f"r{n}", free_port(), config) for n in range(NODES)]
        for server in self.replicas:
            server.start()
            self._meet(server)
        replicas = [redis.Redis.from_url(server.url) for server in self.replicas]
        until(lambda: all(self.is_complete(node) for node in (*self.nodes, *replicas)), 30)
        for replica, node_id in zip(replicas, self.ids, strict=True):
            replica.execute_command("CLUSTER", "REPLICATE", node_id)
        until(lambda: all(replica.info("replication").get("master_link_status") == "up" for replica in replicas), 30)
        return replicas

    @contextmanager
    def client(self, redirect_timeout_seconds: float = 0.2) -> Iterator[FlushableClient]:
        client = FlushableClient(self.servers[0].url, redirect_timeout_seconds=redirect_timeout_seconds)
        try:
            yield client
        finally:
            client.close()

    def find_owner(self, slot: int) -> int:
        """Return the index of the node that reports that it serves the slot."""
        for n, node in enumerate(self.nodes):
            for first, last, (_, _, node_id, *_), *_ in node.execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last and node_id.decode() == self.ids[n]:
                    return n
        raise AssertionError(f"no node serves slot {slot}")

    def begin_move(self, slot: int, to: int) -> int:
        source = self.find_owner(slot)
        self.nodes[to].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        self.nodes[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[to])
        return source

    def migrate_keys(self, source: int, to: int, names: list[bytes]) -> None:
        self.nodes[source].execute_command("MIGRATE", "127.0.0.1", self.ports[to], "", 0, 5000, "KEYS", *names)

    def end_move(self, slot: int, source: int, to: int) -> None:
        # Update the target first: until the source is updated, it redirects clients to the target, which must accept
        # them.
        for node in (self.nodes[to], self.nodes[source], *self.nodes):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[to])

    def move(self, slot: int, to: int, pause: float = 0.0) -> int:
        """Move a slot key by key, as `valkey-cli --cluster reshard` does.

        Return the number of keys.
        """
        source, moved = self.begin_move(slot, to), 0
        while names := self.nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            self.migrate_keys(source, to, names)
            moved += len(names)
            time.sleep(pause)
        self.end_move(slot, source, to)
        return moved

    def move_atomically(self, slot: int, to: int) -> None:
        """Move a slot atomically, as Valkey 9 supports.

        The owner changes when all keys have arrived.
        """
        self.nodes[self.find_owner(slot)].execute_command(
            "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.ids[to]
        )
        until(lambda: self.find_owner(slot) == to, 30)

    def count_errors(self) -> dict[str, int]:
        """Return the number of error replies of all nodes, by kind."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            for name, stats in node.info("errorstats").items():
                kind = name.removeprefix("errorstat_")
                counts[kind] = counts.get(kind, 0) + int(stats["count"])
        return counts

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        for server in (*self.servers, *self.replicas):
            server.kill()


def find_slot(partition: int) -> int:
    return int(key_slot(keys.of_partition(partition).root.encode()))
