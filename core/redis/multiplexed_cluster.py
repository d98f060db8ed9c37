"""A pipe to each primary of a Redis Cluster: what a web process talks to a cluster through.

An answer that was lost is lost here too, and nothing is sent again. What a node did not run, because the slot is
another's or on its way to one, is sent to whom it names; while a slot moves, for as long as a request may take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError, TryAgainError

from core.redis.cluster import CONNECTION_ERRORS, PAUSE_SECONDS, REDIRECTION_ERRORS, Address, ClusterTopology, slot_of
from core.redis.multiplexed_connection import MultiplexedConnection
from core.redis.runners import CommandLine, with_slot_guard


class MultiplexedCluster:
    """`await pipes.send(lines)`, as with a Pipe. Lines for several nodes go to all of them at once."""

    def __init__(self, nodes: ClusterTopology, *, timeout_seconds: float = 5.0) -> None:
        self._nodes = nodes
        self._timeout_seconds = timeout_seconds
        self._pipes: dict[Address, MultiplexedConnection] = {}
        self._looking: asyncio.Task[None] | None = None

    async def send(self, lines: Sequence[CommandLine]) -> list[Any]:
        lines = [with_slot_guard(line) for line in lines]
        slots = [slot_of(line[3]) for line in lines]
        if len(set(slots)) == 1:
            return await self._to(slots[0], lines)
        pieces: dict[int, list[int]] = {}
        for at, slot in enumerate(slots):
            pieces.setdefault(slot, []).append(at)
        found = await asyncio.gather(*(self._to(slot, [lines[at] for at in ats]) for slot, ats in pieces.items()))
        answers: list[Any] = [None] * len(lines)
        for ats, part in zip(pieces.values(), found, strict=True):
            for at, answer in zip(ats, part, strict=True):
                answers[at] = answer
        return answers

    async def close(self) -> None:
        for pipe in self._pipes.values():
            await pipe.close()

    async def _to(self, slot: int, lines: Sequence[CommandLine]) -> list[Any]:
        """Lines of one slot, in order. Only the ones that were not run are sent again."""
        address = self._nodes.known(slot)
        if address is None:
            await asyncio.to_thread(self._nodes.refresh)
            address = self._nodes.known_owner(slot)
        answers = await self._ask(address, lines)
        for at, answer in enumerate(answers):
            if isinstance(answer, REDIRECTION_ERRORS):
                answers[at] = await self._follow(slot, lines[at], answer, address)
            elif isinstance(answer, CONNECTION_ERRORS):
                self._look_again()
        return answers

    async def _follow(self, slot: int, line: CommandLine, answer: Any, address: Address) -> Any:
        loop = asyncio.get_running_loop()
        deadline, has_waited = loop.time() + self._timeout_seconds, True
        while isinstance(answer, REDIRECTION_ERRORS) and loop.time() < deadline:
            if isinstance(answer, TryAgainError) or not has_waited:
                await asyncio.sleep(PAUSE_SECONDS)
                has_waited = True
            else:
                has_waited = False
            address, is_sent_for = self._nodes.after(answer, slot, address)
            # Both in one piece: ASKING holds for the very next command of its connection.
            *_, answer = await self._ask(address, [("ASKING",), line] if is_sent_for else [line])
        return answer

    async def _ask(self, address: Address, lines: Sequence[CommandLine]) -> list[Any]:
        pipe = self._pipes.get(address)
        if pipe is None:
            pipe = self._pipes[address] = MultiplexedConnection(
                self._nodes.url(address), timeout_seconds=self._timeout_seconds
            )
        try:
            return await pipe.send(lines)
        except (RedisError, OSError):
            self._look_again()
            raise

    def _look_again(self) -> None:
        """Learn who serves what now, beside the requests and for all of them together."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        with contextlib.suppress(RedisError):  # the next request that fails looks again
            await asyncio.to_thread(self._nodes.refresh)
