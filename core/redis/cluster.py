"""Redis Cluster: its topology, and a client that sends each command to the right primary.

Every key of codeQ begins with `codeq:`, and nearly all contain their partition as hash tag. So the node of a command
follows from its first key. redis-py's own cluster client is not used (docs/adr/0014): it connects when it is created,
asks a server which arguments of a command are keys, and fails a whole pipeline if one node is down.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.client import Pipeline
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from core.errors import ConfigError

Address = tuple[str, int]
ArgsAndOptions = tuple[tuple[Any, ...], Mapping[str, Any]]
SLOTS = 16_384
# The node did not run the command: it names another node, or asks for another attempt (TRYAGAIN). So sending the
# command again cannot run it twice.
REDIRECTION_ERRORS = (AskError, TryAgainError)  # MovedError is an AskError
# The topology may be out of date: the node is down, or reports that no node serves the slot.
CONNECTION_ERRORS = (ConnectionError, TimeoutError, ClusterDownError)
# The host names of nodes that announce no name. Such a node runs on the host that sent the answer.
UNNAMED_HOSTS = ("", "?")
# The pause between two attempts while a slot moves.
RETRY_PAUSE_SECONDS = 0.02
# Timeout of a request for the state of a node.
PROBE_TIMEOUT_SECONDS = 1.0
# Minimum interval between two reads of the topology, and of the state of the nodes.
TOPOLOGY_SECONDS = 0.5


def slot_of(key: str) -> int:
    """Return the slot of a key, which its hash tag decides."""
    return _slot(key[: key.find("}") + 1] or key)


@lru_cache(maxsize=10_000)
def _slot(key: str) -> int:
    return key_slot(key.encode())


class ClusterTopology:
    """The primaries of a cluster and their slots, as this process last read them. Thread-safe."""

    def __init__(self, url: str, *, timeout_seconds: float = 5.0) -> None:
        """Take the URL of one or more nodes: `redis://a:6379,b:6379`. One that answers is enough."""
        self._url = urlsplit(url)
        self._timeout_seconds = timeout_seconds
        self._seeds = [_address(text) for text in self._url.netloc.rpartition("@")[2].split(",")]
        if self._url.scheme not in ("redis", "rediss") or not self._url.netloc:
            raise ConfigError("REDIS_URL has no host of a cluster node: write redis://host:port.")
        self._primary_of_slot: list[Address | None] = [None] * SLOTS
        self._primaries: frozenset[Address] = frozenset()
        self._clients: dict[tuple[Address, float], redis.Redis] = {}
        self._client_lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._refreshed_at = self._probed_at = -TOPOLOGY_SECONDS
        self._reachable: frozenset[Address] = frozenset()

    def url(self, address: Address | None = None) -> str:
        """Return the URL of a node, by default of any known node."""
        host, port = address or random.choice(self.primaries() or self._seeds)  # noqa: S311 - spreads load
        user, at, _ = self._url.netloc.rpartition("@")
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._url._replace(netloc=f"{user}{at}{netloc}").geturl()

    def client(self, address: Address) -> redis.Redis:
        return self._client(address, self._timeout_seconds)

    def primaries(self) -> list[Address]:
        """Return the known primaries, without asking a node."""
        return sorted(self._primaries)

    def discover_primaries(self) -> list[Address]:
        """Return the known primaries. Ask the cluster if there are no known ones."""
        if not self.primaries():
            self.refresh()
        return self.primaries()

    def known_primary(self, slot: int) -> Address | None:
        """Return the primary that serves a slot, or None if it is unknown, without asking a node."""
        return self._primary_of_slot[slot]

    def primary_of(self, slot: int) -> Address:
        """Return the primary that serves a slot. Ask the cluster if it is unknown.

        Raises ClusterDownError if no primary serves the slot.
        """
        if self._primary_of_slot[slot] is None:
            self.refresh()
        return self.require_primary(slot)

    def require_primary(self, slot: int) -> Address:
        """Return the known primary of a slot. Raises ClusterDownError if there is no known one."""
        address = self._primary_of_slot[slot]
        if address is None:
            raise ClusterDownError(f"no primary serves slot {slot}")
        return address

    def redirect(self, error: ResponseError, slot: int, sender: Address) -> tuple[Address, bool]:
        """Return the node for the next attempt, and whether it needs ASKING first.

        That is the node to which `sender` redirects, or after TRYAGAIN the known primary. MOVED updates the topology.
        """
        if isinstance(error, AskError):
            target = (sender[0] if error.host in UNNAMED_HOSTS else error.host, error.port)
            if isinstance(error, MovedError):
                self._primary_of_slot[slot] = target
                self._primaries |= {target}
                return target, False
            return target, True
        return self.require_primary(slot), False

    def refresh(self) -> None:
        """Read the slots of all primaries from one node. Concurrent callers share one answer."""
        with self._refresh_lock:
            if time.monotonic() - self._refreshed_at < TOPOLOGY_SECONDS:
                return
            self._refreshed_at = time.monotonic()
            primaries = self.primaries()
            random.shuffle(primaries)
            problem: RedisError = ConnectionError("no node of the cluster serves a slot")
            for address in [*primaries, *(seed for seed in self._seeds if seed not in primaries)]:
                try:
                    ranges = self._probe(address).execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
                except RedisError as error:
                    problem = error
                    continue
                if ranges:
                    self._store_slots(ranges, address[0])
                    return
            raise problem

    def reachable(self) -> frozenset[Address]:
        """Return the primaries that answer and report a working cluster.

        The result may be TOPOLOGY_SECONDS old.
        """
        primaries = self.discover_primaries()
        with self._refresh_lock:
            if time.monotonic() - self._probed_at >= TOPOLOGY_SECONDS:
                self._reachable = frozenset(filter(self._is_serving, primaries))
                self._probed_at = time.monotonic()
        if self._reachable != self._primaries:
            with contextlib.suppress(RedisError):
                self.refresh()
        return self._reachable

    def any_node(self) -> redis.Redis:
        """Return the client of a node that answers, even if the cluster is not formed yet."""
        problem: RedisError = ConnectionError("no node of the cluster answers")
        for address in [*self.primaries(), *self._seeds]:
            node = self._probe(address)
            try:
                node.ping()
            except RedisError as error:
                problem = error
            else:
                return node
        raise problem

    def disconnect(self) -> None:
        for client in list(self._clients.values()):
            client.connection_pool.disconnect()

    def _is_serving(self, address: Address) -> bool:
        try:
            info: bytes = self._probe(address).execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
        except RedisError:
            return False
        return b"cluster_state:ok" in info

    def _store_slots(self, ranges: Sequence[Any], sender_host: str) -> None:
        primary_of_slot: list[Address | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            name = (host or b"").decode()
            primary = (sender_host if name in UNNAMED_HOSTS else name, int(port))
            primary_of_slot[first : last + 1] = [primary] * (last + 1 - first)
        self._primary_of_slot, self._primaries = primary_of_slot, frozenset(filter(None, set(primary_of_slot)))

    def _probe(self, address: Address) -> redis.Redis:
        return self._client(address, min(PROBE_TIMEOUT_SECONDS, self._timeout_seconds))

    def _client(self, address: Address, timeout_seconds: float) -> redis.Redis:
        with self._client_lock:
            client = self._clients.get((address, timeout_seconds))
            if client is None:
                client = self._clients[address, timeout_seconds] = redis.Redis.from_url(
                    self.url(address), socket_timeout=timeout_seconds, health_check_interval=30
                )
            return client


class ClusterClient(redis.Redis):
    """redis-py's client for a cluster: sends each command to the primary that serves its key.

    A command whose answer was lost is not sent again, as with one server. A command that a node redirects did not run
    there: redirections are followed for `redirect_timeout_seconds`, for example while a slot moves.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 5.0, redirect_timeout_seconds: float = 5.0) -> None:
        self.topology = ClusterTopology(url, timeout_seconds=timeout_seconds)
        self._redirect_timeout_seconds = redirect_timeout_seconds
        # redis-py's methods that bypass `execute_command` use any node. codeQ does not call them.
        super().__init__(connection_pool=redis.ConnectionPool.from_url(self.topology.url()))

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "SCRIPT LOAD":  # from redis-py's Lock, when a node does not have its script
            answer = None
            for address in self.topology.reachable():
                answer = self.topology.client(address).execute_command(*args, **options)  # type: ignore[no-untyped-call]
            return answer
        slot = slot_of(_key(args))
        return self._follow((args, options), slot, self.topology.primary_of(slot))

    def pipeline(self, transaction: bool = False, shard_hint: None = None) -> Pipeline:
        assert not transaction, "a transaction cannot span the nodes of a cluster"
        return _ClusterPipeline(self)

    def execute_all(self, commands: Sequence[ArgsAndOptions]) -> list[Any]:
        """Send the commands in one batch to each node.

        Return the answers in the order of the commands, with errors as values.
        """
        slots = [slot_of(_key(args)) for args, _ in commands]
        indexes_by_node: dict[Address, list[int]] = {}
        answers: list[Any] = [None] * len(commands)
        for index, slot in enumerate(slots):
            try:
                indexes_by_node.setdefault(self.topology.primary_of(slot), []).append(index)
            except RedisError as error:
                answers[index] = error
        for address, indexes in indexes_by_node.items():
            replies = self._send(address, [commands[index] for index in indexes])
            for index, reply in zip(indexes, replies, strict=True):
                answers[index] = reply
        for index, answer in enumerate(answers):
            if isinstance(answer, REDIRECTION_ERRORS):
                slot = slots[index]
                try:
                    answers[index] = self._follow(commands[index], slot, self.topology.primary_of(slot))
                except RedisError as error:
                    answers[index] = error
            elif isinstance(answer, CONNECTION_ERRORS):
                self._try_refresh()
        return answers

    def _send(self, address: Address, commands: Sequence[ArgsAndOptions]) -> list[Any]:
        pipeline = self.topology.client(address).pipeline(transaction=False)
        for args, options in commands:
            pipeline.execute_command(*args, **options)  # type: ignore[no-untyped-call]
        try:
            return list(pipeline.execute(raise_on_error=False))
        except CONNECTION_ERRORS as error:
            return [error] * len(commands)

    def _follow(self, command: ArgsAndOptions, slot: int, address: Address) -> Any:
        """Send a command, and follow redirections until a node runs it or the timeout ends."""
        args, options = command
        deadline = time.monotonic() + self._redirect_timeout_seconds
        # Follow the first redirection at once, then pause before every second one.
        needs_asking, has_waited = False, True
        while True:
            try:
                if needs_asking:
                    *_, answer = self._send(address, [(("ASKING",), {}), command])
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
                return self.topology.client(address).execute_command(*args, **options)  # type: ignore[no-untyped-call]
            except REDIRECTION_ERRORS as error:
                if time.monotonic() > deadline:
                    raise
                if isinstance(error, TryAgainError) or not has_waited:
                    time.sleep(RETRY_PAUSE_SECONDS)
                    has_waited = True
                else:
                    has_waited = False
                address, needs_asking = self.topology.redirect(error, slot, address)
            except CONNECTION_ERRORS:
                self._try_refresh()
                raise

    def _try_refresh(self) -> None:
        with contextlib.suppress(RedisError):
            self.topology.refresh()

    def close(self) -> None:
        self.topology.disconnect()


class _ClusterPipeline(Pipeline):
    """redis-py's pipeline for a cluster, without transactions, WATCH and script objects."""

    def __init__(self, cluster: ClusterClient) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, False, None)
        self._cluster = cluster

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = self.command_stack, []
        answers = self._cluster.execute_all(commands)
        if raise_on_error:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        return answers


def _key(args: Sequence[Any]) -> str:
    """Return the first key of the command.

    No argument before the key comes from a client, so a client's text cannot be mistaken for the key.
    """
    for arg in args[1:]:
        if isinstance(arg, str) and arg.startswith("codeq:"):
            return arg
    raise ValueError(f"{args[0]} has no key of codeQ, so its node is unknown")


def _address(text: str) -> Address:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "127.0.0.1", parts.port or 6379
