"""Script calls: the commands of a transition and the function that reads their replies.

`await call` sends it on the event loop, `call.run_sync()` blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from msgspec import Struct

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
# The arguments of EVALSHA: the script's SHA, the number of keys, the keys, the script's arguments.
BoundArguments = tuple[Any, ...]


class ScriptSource(Protocol):
    """A Lua script that a runner can send to a server that does not have it."""

    @property
    def source(self) -> str: ...


# One command of a call: a script and its bound arguments.
ScriptCommand = tuple[ScriptSource, BoundArguments]


class Runner(Protocol):
    """Sends the commands of a call to Redis in order, in one round trip to each server."""

    def run(self, commands: Sequence[ScriptCommand]) -> Awaitable[list[Any]]: ...

    def run_sync(self, commands: Sequence[ScriptCommand]) -> list[Any]: ...


class ScriptCall(Struct, Generic[R], frozen=True, eq=False):
    """Commands and the function that turns their replies into the result.

    The function may return another call instead, because a script bounds the work of one run. That call is sent next.
    """

    runner: Runner
    commands: Sequence[ScriptCommand]
    read: Callable[[list[Any]], R | ScriptCall[R]]

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
        """Return this call with `change` applied to its result.

        `change` may return another call, which is sent next.
        """

        def read(replies: list[Any]) -> S | ScriptCall[S]:
            result = self.read(replies)
            return result.and_then(change) if isinstance(result, ScriptCall) else change(result)

        return ScriptCall(self.runner, self.commands, read)

    def on_error(self, error: type[Exception], callback: Callable[[], None]) -> ScriptCall[R]:
        """Return this call with a callback that runs before an error of the given type is raised."""

        def read(replies: list[Any]) -> R | ScriptCall[R]:
            try:
                return self.read(replies)
            except error:
                callback()
                raise

        return ScriptCall(self.runner, self.commands, read)


def send_in_parts(
    items: Sequence[T], size: int, prepare: Callable[[Sequence[T]], ScriptCall[list[R]]]
) -> ScriptCall[list[R]]:
    """Return a call that sends the items in parts, one after the other.

    Its result is the list of the results of all items. `prepare` returns the call of one part. Commands of other
    clients run between the parts.
    """
    call = prepare(items[:size])
    if len(items) <= size:
        return call
    return call.and_then(
        lambda results: send_in_parts(items[size:], size, prepare).and_then(lambda others: results + others)
    )


def merge_calls(runner: Runner, calls: Sequence[ScriptCall[R]]) -> ScriptCall[list[R]]:
    """Return one call that sends all of the calls in one round trip.

    Its result is the list of their results, in order. The further calls of unfinished ones are sent together, too.
    """

    def read(replies: list[Any]) -> list[R] | ScriptCall[list[R]]:
        results: list[R | ScriptCall[R]] = []
        start = 0
        for call in calls:
            results.append(call.read(replies[start : start + len(call.commands)]))
            start += len(call.commands)
        unfinished = [index for index, result in enumerate(results) if isinstance(result, ScriptCall)]
        if not unfinished:
            return cast("list[R]", results)

        def fill(finished: list[R]) -> list[R]:
            for index, result in zip(unfinished, finished, strict=True):
                results[index] = result
            return cast("list[R]", results)

        return merge_calls(runner, [cast("ScriptCall[R]", results[index]) for index in unfinished]).and_then(fill)

    return ScriptCall(runner, [command for call in calls for command in call.commands], read)
