"""Waiting for a condition, with a deadline; the only place in the tests that sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# Only a failing test waits this long, so the value suits the slowest machine.
SECONDS = 30.0


def until(predicate: Callable[[], T], seconds: float = SECONDS, *, every: float = 0.01) -> T:
    """Poll until the predicate returns a true value, and return it.

    Raises AssertionError at the deadline.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s; the last answer was {answer!r}")
        time.sleep(every)


async def until_async(predicate: Callable[[], Awaitable[T]], seconds: float = SECONDS, *, every: float = 0.01) -> T:
    """Do the same as `until` on the event loop."""
    deadline = time.monotonic() + seconds
    while True:
        answer = await predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s; the last answer was {answer!r}")
        await asyncio.sleep(every)
