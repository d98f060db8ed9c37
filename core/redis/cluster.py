"""A Redis Cluster: which primary serves which slot, and a client that asks the one that has the key.

Every key of ours begins with `codeq:` and nearly all carry their partition as hash tag, so the node of a command is
known without asking anybody. That is why redis-py's own cluster client is not used (docs/adr/0014): it connects when
it is made, asks a server for the keys of many a command, and fails a whole pipeline for one node that is away.
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
Command = tuple[tuple[Any, ...], Mapping[str, Any]]
SLOTS = 16_384
# A node said that it did not run the command, and who may: it can be sent again without harm.
REDIRECTION_ERRORS = (AskError, TryAgainError)  # MovedError is an AskError
# The map may be wrong: the node is gone, or says that nobody serves the slot.
CONNECTION_ERRORS = (ConnectionError, TimeoutError, ClusterDownError)
# What a node is called that announces no name: it is on the host that was asked.
UNNAMED = ("", "?")
# Between two tries while a slot moves, and how long a node may take to tell how it is.
PAUSE_SECONDS = 0.02
PROBE_SECONDS = 1.0
# What is known of the nodes is asked for again no sooner than this.
KNOWN_SECONDS = 0.5


def slot_of(key: str) -> int:
    return _slot(key[: key.find("}") + 1] or key)


@lru_cache(maxsize=10_000)
def _slot(key: str) -> int:
    return key_slot(key.encode())


class ClusterTopology:
    """What one process knows of the cluster: its primaries, and the slots of each. Any thread may ask."""

    def __init__(self, url: str, *, timeout_seconds: float = 5.0) -> None:
        """`url`: `redis://host:port`, or several of them: `redis://a:6379,b:6379`. One that answers is enough."""
        self._url = urlsplit(url)
        self._timeout_seconds = timeout_seconds
        self._seeds = [_address(text) for text in self._url.netloc.rpartition("@")[2].split(",")]
        if self._url.scheme not in ("redis", "rediss") or not self._url.netloc:
            raise ConfigError("REDIS_URL names no node of a cluster: write redis://host:port.")
        self._owners: list[Address | None] = [None] * SLOTS
        self._primaries: frozenset[Address] = frozenset()
        self._clients: dict[tuple[Address, float], redis.Redis] = {}
        self._making = threading.Lock()
        self._asking = threading.Lock()
        self._asked = self._probed = -KNOWN_SECONDS
        self._there: frozenset[Address] = frozenset()

    def url(self, address: Address | None = None) -> str:
        """Of one node; of any that is known, if none is named."""
        host, port = address or random.choice(self.primaries() or self._seeds)  # noqa: S311 - spreads load
        user, at, _ = self._url.netloc.rpartition("@")
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._url._replace(netloc=f"{user}{at}{place}").geturl()

    def client(self, address: Address) -> redis.Redis:
        return self._client(address, self._timeout_seconds)

    def primaries(self) -> list[Address]:
        return sorted(self._primaries)

    def all(self) -> list[Address]:
        """The same, asked for if nothing is known yet."""
        if not self.primaries():
            self.refresh()
        return self.primaries()

    def known(self, slot: int) -> Address | None:
        return self._owners[slot]

    def owner(self, slot: int) -> Address:
        if self._owners[slot] is None:
            self.refresh()
        return self.known_owner(slot)

    def known_owner(self, slot: int) -> Address:
        address = self._owners[slot]
        if address is None:
            raise ClusterDownError(f"no primary serves slot {slot}")
        return address

    def after(self, error: ResponseError, slot: int, asked: Address) -> tuple[Address, bool]:
        """Whom to ask after this answer of `asked`, and whether that one must be told that it was sent for (ASKING)."""
        if isinstance(error, AskError):
            other = (asked[0] if error.host in UNNAMED else error.host, error.port)
            if isinstance(error, MovedError):
                self._owners[slot] = other
                self._primaries |= {other}
                return other, False
            return other, True
        return self.known_owner(slot), False

    def refresh(self) -> None:
        """Ask one node who serves what. Many who want to know at the same time share the answer."""
        with self._asking:
            if time.monotonic() - self._asked < KNOWN_SECONDS:
                return
            self._asked = time.monotonic()
            known = self.primaries()
            random.shuffle(known)
            problem: RedisError = ConnectionError("no node of the cluster serves a slot")
            for address in [*known, *(seed for seed in self._seeds if seed not in known)]:
                try:
                    ranges = self._probe(address).execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
                except RedisError as error:
                    problem = error
                    continue
                if ranges:
                    self._take(ranges, address[0])
                    return
            raise problem

    def there(self) -> frozenset[Address]:
        """The primaries that answer, and whose cluster lets them serve. A look at all of them, half a second old."""
        primaries = self.all()
        with self._asking:
            if time.monotonic() - self._probed >= KNOWN_SECONDS:
                self._there = frozenset(filter(self._serves, primaries))
                self._probed = time.monotonic()
        if self._there != self._primaries:
            with contextlib.suppress(RedisError):
                self.refresh()
        return self._there

    def any(self) -> redis.Redis:
        """A node that answers, be it part of the cluster yet or not."""
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

    def _serves(self, address: Address) -> bool:
        try:
            info: bytes = self._probe(address).execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
        except RedisError:
            return False
        return b"cluster_state:ok" in info

    def _take(self, ranges: Sequence[Any], asked: str) -> None:
        owners: list[Address | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            named = (host or b"").decode()
            owner = (asked if named in UNNAMED else named, int(port))
            owners[first : last + 1] = [owner] * (last + 1 - first)
        self._owners, self._primaries = owners, frozenset(filter(None, set(owners)))

    def _probe(self, address: Address) -> redis.Redis:
        return self._client(address, min(PROBE_SECONDS, self._timeout_seconds))

    def _client(self, address: Address, timeout_seconds: float) -> redis.Redis:
        with self._making:
            client = self._clients.get((address, timeout_seconds))
            if client is None:
                client = self._clients[address, timeout_seconds] = redis.Redis.from_url(
                    self.url(address), socket_timeout=timeout_seconds, health_check_interval=30
                )
            return client


class ClusterClient(redis.Redis):
    """redis-py's client, every command of which goes to the primary that serves its key.

    As on one server nothing is sent again whose answer was lost. What a node sends on to another did not run there:
    that is followed for as long as `patience_seconds`, through the move of a slot.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 5.0, patience_seconds: float = 5.0) -> None:
        self.nodes = ClusterTopology(url, timeout_seconds=timeout_seconds)
        self._patience_seconds = patience_seconds
        # What of redis-py does not go through `execute_command` goes to any node; nothing of ours does.
        super().__init__(connection_pool=redis.ConnectionPool.from_url(self.nodes.url()))

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "SCRIPT LOAD":  # redis-py's Lock does, where its EVALSHA met a node without the script
            answer = None
            for address in self.nodes.there():
                answer = self.nodes.client(address).execute_command(*args, **options)  # type: ignore[no-untyped-call]
            return answer
        slot = slot_of(_key(args))
        return self._follow((args, options), slot, self.nodes.owner(slot))

    def pipeline(self, transaction: bool = False, shard_hint: None = None) -> Pipeline:
        assert not transaction, "no transaction goes over a cluster's nodes"
        return _Batch(self)

    def together(self, commands: Sequence[Command]) -> list[Any]:
        """The answers, or the errors in their place, of commands that go to each node in one piece."""
        slots = [slot_of(_key(args)) for args, _ in commands]
        pieces: dict[Address, list[int]] = {}
        answers: list[Any] = [None] * len(commands)
        for at, slot in enumerate(slots):
            try:
                pieces.setdefault(self.nodes.owner(slot), []).append(at)
            except RedisError as error:
                answers[at] = error
        for address, ats in pieces.items():
            found = self._send(address, [commands[at] for at in ats])
            for at, answer in zip(ats, found, strict=True):
                answers[at] = answer
        for at, answer in enumerate(answers):
            if isinstance(answer, REDIRECTION_ERRORS):
                try:
                    answers[at] = self._follow(commands[at], slots[at], self.nodes.owner(slots[at]))
                except RedisError as error:
                    answers[at] = error
            elif isinstance(answer, CONNECTION_ERRORS):
                self._look_again()
        return answers

    def _send(self, address: Address, commands: Sequence[Command]) -> list[Any]:
        pipeline = self.nodes.client(address).pipeline(transaction=False)
        for args, options in commands:
            pipeline.execute_command(*args, **options)  # type: ignore[no-untyped-call]
        try:
            return list(pipeline.execute(raise_on_error=False))
        except CONNECTION_ERRORS as error:
            return [error] * len(commands)

    def _follow(self, command: Command, slot: int, address: Address) -> Any:
        args, options = command
        deadline, is_sent_for, has_waited = time.monotonic() + self._patience_seconds, False, True
        while True:
            try:
                if is_sent_for:
                    *_, answer = self._send(address, [(("ASKING",), {}), command])
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
                return self.nodes.client(address).execute_command(*args, **options)  # type: ignore[no-untyped-call]
            except REDIRECTION_ERRORS as error:
                if time.monotonic() > deadline:
                    raise
                if isinstance(error, TryAgainError) or not has_waited:
                    time.sleep(PAUSE_SECONDS)
                    has_waited = True
                else:
                    has_waited = False
                address, is_sent_for = self.nodes.after(error, slot, address)
            except CONNECTION_ERRORS:
                self._look_again()
                raise

    def _look_again(self) -> None:
        with contextlib.suppress(RedisError):
            self.nodes.refresh()

    def close(self) -> None:
        self.nodes.disconnect()


class _Batch(Pipeline):
    """redis-py's pipeline, whose commands go to their nodes. Without transactions, WATCH and scripts."""

    def __init__(self, cluster: ClusterClient) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, False, None)
        self._cluster = cluster

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = self.command_stack, []
        answers = self._cluster.together(commands)
        if raise_on_error:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        return answers


def _key(args: Sequence[Any]) -> str:
    """The first of our keys in the command: text of others only ever comes behind it."""
    for arg in args[1:]:
        if isinstance(arg, str) and arg.startswith("codeq:"):
            return arg
    raise ValueError(f"{args[0]} names no key of ours, so no node of the cluster")


def _address(text: str) -> Address:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "127.0.0.1", parts.port or 6379
