"""Carries the commands of a call to Redis and back: one round trip, whatever their number.

A script that the server does not have is sent whole, once; the refusal comes before anything ran. What Redis says
about itself (out of memory, loading, gone) becomes `Unavailable`; what a script says is not touched here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
import redis.asyncio
from redis import exceptions

from codeq_site.errors import StoreFull, Unavailable
from queues.engine.call import Command

Line = tuple[Any, ...]
Send = Callable[[Sequence[Line]], Awaitable[list[Any]]]
# Redis is there but will not take a write now: the first word of its refusal.
NOT_NOW = ("MISCONF", "READONLY", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "BUSY", "LOADING")


def raised(error: Exception) -> Exception:
    """The error of ours that an error of the client stands for."""
    if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith("OOM"):
        return StoreFull(retry_after_seconds=5)
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.ReadOnlyError | OSError):
        return Unavailable(retry_after_seconds=1)
    if isinstance(error, exceptions.ResponseError) and str(error).startswith(NOT_NOW):
        return Unavailable(retry_after_seconds=1)
    return error


def missing(answers: Sequence[Any]) -> list[int]:
    """Which answers say that the script is not there."""
    return [at for at, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]


def checked(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise raised(answer) from answer
    return answers


class SyncRunner:
    def __init__(self, client: redis.Redis | redis.RedisCluster) -> None:
        self.client = client

    def run_now(self, commands: Sequence[Command]) -> list[Any]:
        try:
            answers = self._send([("EVALSHA", *bound) for _, bound in commands])
            for at in missing(answers):
                script, bound = commands[at]
                answers[at] = self._send([("EVAL", script.source, *bound[1:])])[0]
        except (exceptions.RedisError, OSError) as error:
            raise raised(error) from error
        return checked(answers)

    def _send(self, lines: list[tuple[Any, ...]]) -> list[Any]:
        if len(lines) == 1:
            try:
                return [self.client.execute_command(*lines[0])]  # type: ignore[no-untyped-call]
            except exceptions.ResponseError as error:
                return [error]
        pipeline = self.client.pipeline(transaction=False)
        for line in lines:
            pipeline.execute_command(*line)
        return list(pipeline.execute(raise_on_error=False))

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        return await asyncio.to_thread(self.run_now, commands)


class AsyncRunner:
    """The web's runner: awaits on `send`, and lends `now` to a sync runner for code in threads."""

    def __init__(self, send: Send, sync: SyncRunner) -> None:
        self._send = send
        self.run_now = sync.run_now

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        try:
            answers = await self._send([("EVALSHA", *bound) for _, bound in commands])
            for at in missing(answers):
                script, bound = commands[at]
                answers[at] = (await self._send([("EVAL", script.source, *bound[1:])]))[0]
        except (exceptions.RedisError, OSError) as error:  # a TimeoutError is an OSError
            raise raised(error) from error
        return checked(answers)


def through(client: redis.asyncio.RedisCluster, timeout_seconds: float) -> Send:
    """`send` for a cluster, whose client finds the node of each line's keys itself."""

    async def send(lines: Sequence[Line]) -> list[Any]:
        async with asyncio.timeout(timeout_seconds):
            return await asyncio.gather(*(client.execute_command(*line) for line in lines), return_exceptions=True)

    return send
