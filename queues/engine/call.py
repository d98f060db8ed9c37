"""A transition as a value: what to send, and how to read the answer. `await call` or `call.now()` sends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from queues.engine.scripts import Bound, Script

R = TypeVar("R")
S = TypeVar("S")
# One command of a call: a script with what it is bound to.
Command = tuple[Script, Bound]


class Runner(Protocol):
    """What carries commands to Redis: all of one call go in one round trip, in order, to one slot."""

    def run(self, commands: Sequence[Command]) -> Awaitable[list[Any]]: ...

    def run_now(self, commands: Sequence[Command]) -> list[Any]: ...


class Call(Generic[R]):
    """Commands and the function that turns their replies into the result.

    The function may answer with another Call, where the script's own bound on work was reached: it is sent next.
    """

    __slots__ = ("commands", "read", "runner")

    def __init__(self, runner: Runner, commands: Sequence[Command], read: Callable[[list[Any]], R | Call[R]]) -> None:
        self.runner = runner
        self.commands = commands
        self.read = read

    def __await__(self) -> Generator[Any, None, R]:
        call = self
        while True:
            result = call.read((yield from call.runner.run(call.commands).__await__()) if call.commands else [])
            if not isinstance(result, Call):
                return result
            call = result

    def now(self) -> R:
        call = self
        while True:
            result = call.read(call.runner.run_now(call.commands) if call.commands else [])
            if not isinstance(result, Call):
                return result
            call = result

    def then(self, change: Callable[[R], S]) -> Call[S]:
        """The same call, its result passed through `change`."""
        return self.follow(change)

    def follow(self, change: Callable[[R], S | Call[S]]) -> Call[S]:
        """The same call, its result passed through `change`, which may answer with the call that comes next."""

        def read(replies: list[Any]) -> S | Call[S]:
            result = self.read(replies)
            return result.follow(change) if isinstance(result, Call) else change(result)

        return Call(self.runner, self.commands, read)

    def catch(self, error: type[Exception], note: Callable[[], None]) -> Call[R]:
        """The same call; when it ends in `error`, `note` is told before the error goes on."""

        def read(replies: list[Any]) -> R | Call[R]:
            try:
                return self.read(replies)
            except error:
                note()
                raise

        return Call(self.runner, self.commands, read)


def together(runner: Runner, calls: Sequence[Call[R]]) -> Call[list[R]]:
    """Many calls in one round trip, their results in order. None of them may be followed by another."""

    def read(replies: list[Any]) -> list[R]:
        results, at = [], 0
        for call in calls:
            result = call.read(replies[at : at + len(call.commands)])
            assert not isinstance(result, Call)
            results.append(result)
            at += len(call.commands)
        return results

    return Call(runner, [command for call in calls for command in call.commands], read)
