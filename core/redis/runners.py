"""Carries the commands of a call to Redis and back: one round trip, whatever their number.

A script that the server does not have is sent whole, once; the refusal comes before anything ran. What Redis says
about itself (out of memory, loading, gone) becomes `Unavailable`; what a script says is not touched here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
from redis import exceptions

from core.errors import StoreFull, Unavailable
from core.redis.cluster import ClusterClient
from core.redis.script_call import Command

CommandLine = tuple[Any, ...]
Send = Callable[[Sequence[CommandLine]], Awaitable[list[Any]]]
# Redis is gone, or is not the one to ask now: a failover, a slot on its way to another node.
UNAVAILABLE_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
    OSError,
)
# Redis is there but will not take a write now: the first word of its refusal, where redis-py has no class for it.
REFUSED_WRITES = ("MISCONF ", "NOREPLICAS ", "BUSY ")


def translate_error(error: Exception) -> Exception:
    """The error of ours that an error of the client stands for."""
    if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith("OOM"):
        return StoreFull(retry_after_seconds=5)
    if isinstance(error, UNAVAILABLE_ERRORS):
        return Unavailable(retry_after_seconds=1)
    if isinstance(error, exceptions.ResponseError) and str(error).startswith(REFUSED_WRITES):
        return Unavailable(retry_after_seconds=1)
    return error


def missing_scripts(answers: Sequence[Any]) -> list[int]:
    """Which answers say that the script is not there."""
    return [at for at, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]


def has_error(answers: Sequence[Any]) -> bool:
    for answer in answers:  # noqa: SIM110 - `any` makes a generator, for what is nearly always one answer
        if isinstance(answer, Exception):
            return True
    return False


def raise_errors(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise translate_error(answer) from answer
    return answers


class SyncRunner:
    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run_sync(self, commands: Sequence[Command]) -> list[Any]:
        try:
            answers = self._send([("EVALSHA", *bound) for _, bound in commands])
            for at in missing_scripts(answers):
                script, bound = commands[at]
                answers[at] = self._send([("EVAL", script.source, *bound[1:])])[0]
        except (exceptions.RedisError, OSError) as error:
            raise translate_error(error) from error
        return raise_errors(answers)

    def _send(self, lines: list[tuple[Any, ...]]) -> list[Any]:
        if len(lines) == 1:
            try:
                return [self.client.execute_command(*lines[0])]  # type: ignore[no-untyped-call]
            except exceptions.ResponseError as error:
                return [error]
        pipeline = self.client.pipeline(transaction=False)
        for line in lines:
            pipeline.execute_command(*line)  # type: ignore[no-untyped-call]
        return list(pipeline.execute(raise_on_error=False))

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        return await asyncio.to_thread(self.run_sync, commands)


def with_slot_guard(line: CommandLine) -> CommandLine:
    """The line with one more key, in the slot of the others, which never exists.

    While a slot moves to another node, a script could run with part of the keys, take a task whose record has gone
    ahead for a ghost, and lose it. Because of this key, some node always lacks one, and so answers TRYAGAIN (or sends
    us to the other node, which answers that) before the script begins, until all keys are in one place again.
    """
    verb, script, count, first, *rest = line
    absent = first[: first.index("}") + 1] + ":absent"
    return (verb, script, count + 1, first, *rest[: count - 1], absent, *rest[count - 1 :])


class ClusterRunner(SyncRunner):
    """The same on a Redis Cluster. The keys of a line are in one slot; the lines of one call may be of many nodes."""

    def __init__(self, cluster: ClusterClient) -> None:
        self.cluster = cluster

    def _send(self, lines: list[CommandLine]) -> list[Any]:
        return self.cluster.together([(with_slot_guard(line), {}) for line in lines])


class AsyncRunner:
    """The web's runner: awaits on `send`, and lends `now` to a sync runner for code in threads."""

    def __init__(self, send: Send, sync: SyncRunner) -> None:
        self._send = send
        self.run_sync = sync.run_sync

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        try:
            answers = await self._send([("EVALSHA", *bound) for _, bound in commands])
            if not has_error(answers):
                return answers
            for at in missing_scripts(answers):
                script, bound = commands[at]
                answers[at] = (await self._send([("EVAL", script.source, *bound[1:])]))[0]
        except (exceptions.RedisError, OSError) as error:  # so is a TimeoutError
            raise translate_error(error) from error
        return raise_errors(answers)
