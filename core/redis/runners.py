"""Send all commands of a script call to Redis in one round trip.

If the server does not have a script, the command is sent again with the script's source (EVAL); the first attempt ran
nothing. Errors of the server (out of memory, loading, unreachable) become `Unavailable`. Replies of a script are
returned unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
from redis import exceptions

from core.errors import StoreFull, Unavailable
from core.redis.cluster import ClusterClient
from core.redis.script_call import ScriptCommand

# The arguments of one command, for example ("EVALSHA", sha, 1, key).
RedisCommand = tuple[Any, ...]
Send = Callable[[Sequence[RedisCommand]], Awaitable[list[Any]]]
# Redis is unreachable, or this node does not serve the key now: during a failover or while a slot moves.
UNAVAILABLE_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
    OSError,
)
# Redis answers but rejects writes. redis-py has no classes for these errors; only their first words identify them.
REJECTED_WRITE_PREFIXES = ("MISCONF ", "NOREPLICAS ", "BUSY ")


def translate_error(error: Exception) -> Exception:
    """Return the CodeqError for an error of the Redis client, or any other error unchanged."""
    if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith("OOM"):
        return StoreFull(retry_after_seconds=5)
    if isinstance(error, UNAVAILABLE_ERRORS):
        return Unavailable(retry_after_seconds=1)
    if isinstance(error, exceptions.ResponseError) and str(error).startswith(REJECTED_WRITE_PREFIXES):
        return Unavailable(retry_after_seconds=1)
    return error


def missing_scripts(answers: Sequence[Any]) -> list[int]:
    """Return the indexes of the commands whose script the server does not have."""
    return [index for index, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]


def raise_errors(answers: list[Any]) -> list[Any]:
    """Return the answers, or raise the translated form of the first error among them."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise translate_error(answer) from answer
    return answers


class SyncRunner:
    """Runs script calls with a sync client. `run` uses a thread; only tests call it."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run_sync(self, commands: Sequence[ScriptCommand]) -> list[Any]:
        try:
            answers = self._send([("EVALSHA", *bound) for _, bound in commands])
            for index in missing_scripts(answers):
                script, bound = commands[index]
                answers[index] = self._send([("EVAL", script.source, *bound[1:])])[0]
        except (exceptions.RedisError, OSError) as error:
            raise translate_error(error) from error
        return raise_errors(answers)

    def _send(self, commands: list[RedisCommand]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [self.client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
            except exceptions.ResponseError as error:
                return [error]
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        return list(pipeline.execute(raise_on_error=False))

    async def run(self, commands: Sequence[ScriptCommand]) -> list[Any]:
        return await asyncio.to_thread(self.run_sync, commands)


def with_slot_guard(command: RedisCommand) -> RedisCommand:
    """Return the command with one more key, in the slot of the others, that never exists.

    While a slot moves to another node, a script could run with only some of the keys. If the record of a task has
    moved and its queue has not, the script would mistake the task for a ghost (docs/adr/0008) and remove it. The
    absent key prevents this: a node that does not have all keys answers TRYAGAIN, or redirects to the other node, which
    answers TRYAGAIN, before the script begins. The script runs when all keys are on one node again.
    """
    verb, script, count, first, *rest = command
    absent = first[: first.index("}") + 1] + ":absent"
    return (verb, script, count + 1, first, *rest[: count - 1], absent, *rest[count - 1 :])


class ClusterRunner(SyncRunner):
    """A SyncRunner for a Redis Cluster.

    The keys of a command are in one slot. The commands of one call may belong to several nodes.
    """

    def __init__(self, cluster: ClusterClient) -> None:
        self.cluster = cluster

    def _send(self, commands: list[RedisCommand]) -> list[Any]:
        return self.cluster.execute_all([(with_slot_guard(command), {}) for command in commands])


class AsyncRunner:
    """Runs script calls of web processes: `run` on the event loop, `run_sync` in threads."""

    def __init__(self, send: Send, sync: SyncRunner) -> None:
        self._send = send
        self.run_sync = sync.run_sync

    async def run(self, commands: Sequence[ScriptCommand]) -> list[Any]:
        try:
            answers = await self._send([("EVALSHA", *bound) for _, bound in commands])
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            if not failed:
                return answers
            for index in missing_scripts(answers):
                script, bound = commands[index]
                answers[index] = (await self._send([("EVAL", script.source, *bound[1:])]))[0]
        except (exceptions.RedisError, OSError) as error:  # TimeoutError is an OSError
            raise translate_error(error) from error
        return raise_errors(answers)
