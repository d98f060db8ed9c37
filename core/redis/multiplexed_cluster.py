"""One multiplexed connection to each primary of a Redis Cluster, for web processes.

A command whose answer was lost is not sent again. A node that redirects a command did not run it, so the command is
sent again, to the node that the answer names. While a slot moves, this is repeated until the request's timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError, TryAgainError

from core.redis.cluster import (
    CONNECTION_ERRORS,
    REDIRECTION_ERRORS,
    RETRY_PAUSE_SECONDS,
    Address,
    ClusterTopology,
    slot_of,
)
from core.redis.multiplexed_connection import MultiplexedConnection
from core.redis.runners import RedisCommand, with_slot_guard


class MultiplexedCluster:
    """A `MultiplexedConnection` to each node. Commands for several nodes are sent concurrently."""

    def __init__(self, topology: ClusterTopology, *, timeout_seconds: float = 5.0) -> None:
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        self._connections: dict[Address, MultiplexedConnection] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def send(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Return the answers in the order of the commands, with errors of Redis as values."""
        commands = [with_slot_guard(command) for command in commands]
        slots = [slot_of(command[3]) for command in commands]
        if len(set(slots)) == 1:
            return await self._send_to_slot(slots[0], commands)
        indexes_by_slot: dict[int, list[int]] = {}
        for index, slot in enumerate(slots):
            indexes_by_slot.setdefault(slot, []).append(index)
        parts = await asyncio.gather(
            *(
                self._send_to_slot(slot, [commands[index] for index in indexes])
                for slot, indexes in indexes_by_slot.items()
            )
        )
        answers: list[Any] = [None] * len(commands)
        for indexes, part in zip(indexes_by_slot.values(), parts, strict=True):
            for index, answer in zip(indexes, part, strict=True):
                answers[index] = answer
        return answers

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def _send_to_slot(self, slot: int, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send the commands of one slot in order. Follow redirections of those that did not run."""
        address = self._topology.known_primary(slot)
        if address is None:
            await asyncio.to_thread(self._topology.refresh)
            address = self._topology.require_primary(slot)
        answers = await self._send_to_node(address, commands)
        for index, answer in enumerate(answers):
            if isinstance(answer, REDIRECTION_ERRORS):
                answers[index] = await self._follow(slot, commands[index], answer, address)
            elif isinstance(answer, CONNECTION_ERRORS):
                self._start_refresh()
        return answers

    async def _follow(self, slot: int, command: RedisCommand, answer: Any, address: Address) -> Any:
        loop = asyncio.get_running_loop()
        # Follow the first redirection at once, then pause before every second one.
        deadline, has_waited = loop.time() + self._timeout_seconds, True
        while isinstance(answer, REDIRECTION_ERRORS) and loop.time() < deadline:
            if isinstance(answer, TryAgainError) or not has_waited:
                await asyncio.sleep(RETRY_PAUSE_SECONDS)
                has_waited = True
            else:
                has_waited = False
            address, needs_asking = self._topology.redirect(answer, slot, address)
            # Send both in one write: ASKING applies only to the next command of its connection.
            *_, answer = await self._send_to_node(address, [("ASKING",), command] if needs_asking else [command])
        return answer

    async def _send_to_node(self, address: Address, commands: Sequence[RedisCommand]) -> list[Any]:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = MultiplexedConnection(
                self._topology.url(address), timeout_seconds=self._timeout_seconds
            )
        try:
            return await connection.send(commands)
        except (RedisError, OSError):
            self._start_refresh()
            raise

    def _start_refresh(self) -> None:
        """Refresh the topology in a background task, unless one is running."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        with contextlib.suppress(RedisError):  # the next request that fails starts another refresh
            await asyncio.to_thread(self._topology.refresh)
