"""Poll until a condition is true, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# Long enough for a slow machine. Only a failing test waits this long.
SECONDS = 30.0


def until(predicate: Callable[[], T], seconds: float = SECONDS, *, every: float = 0.01) -> T:
    """Call the predicate until its result is true, and return the result.

    Raises AssertionError at the deadline.
    """
    deadline = time.monotonic() + seconds
    while True:
        result = predicate()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s; the last result was {result!r}")
        time.sleep(every)


async def until_async(predicate: Callable[[], Awaitable[T]], seconds: float = SECONDS, *, every: float = 0.01) -> T:
    """Await the predicate until its result is true, like `until`."""
    deadline = time.monotonic() + seconds
    while True:
        result = await predicate()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s; the last result was {result!r}")
        await asyncio.sleep(every)
