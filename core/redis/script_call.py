"""A transition as a value: what to send, and how to read the answer. `await call` or `call.run_sync()` sends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

R = TypeVar("R")
S = TypeVar("S")
# The words after EVALSHA: the script's SHA, the number of keys, the keys, the arguments.
Bound = tuple[Any, ...]


class Script(Protocol):
    """A Lua script as a runner needs it."""

    @property
    def source(self) -> str: ...


# One command of a call: a script and its bound words.
Command = tuple[Script, Bound]


class Runner(Protocol):
    """What carries commands to Redis: all of one call go in one round trip, in order, to one slot."""

    def run(self, commands: Sequence[Command]) -> Awaitable[list[Any]]: ...

    def run_sync(self, commands: Sequence[Command]) -> list[Any]: ...


class ScriptCall(Generic[R]):
    """Commands and the function that turns their replies into the result.

    The function may answer with another Call, where the script's own bound on work was reached: it is sent next.
    """

    __slots__ = ("commands", "read", "runner")

    def __init__(
        self, runner: Runner, commands: Sequence[Command], read: Callable[[list[Any]], R | ScriptCall[R]]
    ) -> None:
        self.runner = runner
        self.commands = commands
        self.read = read

    def __await__(self) -> Generator[Any, None, R]:
        call = self
        while True:
            result = call.read((yield from call.runner.run(call.commands).__await__()) if call.commands else [])
            if not isinstance(result, ScriptCall):
                return result
            call = result

    def run_sync(self) -> R:
        call = self
        while True:
            result = call.read(call.runner.run_sync(call.commands) if call.commands else [])
            if not isinstance(result, ScriptCall):
                return result
            call = result

    def and_then(self, change: Callable[[R], S | ScriptCall[S]]) -> ScriptCall[S]:
        """The same call, its result passed through `change`, which may answer with the call that comes next."""

        def read(replies: list[Any]) -> S | ScriptCall[S]:
            result = self.read(replies)
            return result.and_then(change) if isinstance(result, ScriptCall) else change(result)

        return ScriptCall(self.runner, self.commands, read)

    def catch(self, error: type[Exception], note: Callable[[], None]) -> ScriptCall[R]:
        """The same call; when it ends in `error`, `note` is told before the error goes on."""

        def read(replies: list[Any]) -> R | ScriptCall[R]:
            try:
                return self.read(replies)
            except error:
                note()
                raise

        return ScriptCall(self.runner, self.commands, read)


def merge_calls(runner: Runner, calls: Sequence[ScriptCall[R]]) -> ScriptCall[list[R]]:
    """Many calls in one round trip, their results in order. None of them may be followed by another."""

    def read(replies: list[Any]) -> list[R]:
        results, at = [], 0
        for call in calls:
            result = call.read(replies[at : at + len(call.commands)])
            assert not isinstance(result, ScriptCall)
            results.append(result)
            at += len(call.commands)
        return results

    return ScriptCall(runner, [command for call in calls for command in call.commands], read)
