"""Run many clients at once, each with a thread and a connection, started by a barrier."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from core import errors
from core.redis.script_call import ScriptCall
from tests.queues.engine.checked_engine import CheckedEngine

T = TypeVar("T")


def run_together(
    url: str,
    actions: Sequence[Callable[[CheckedEngine], T]],
    *,
    clocks: Sequence[Callable[[], int] | None] = (),
    **options: Any,
) -> list[T]:
    """Run every action in a thread, starting them together.

    Return the results in order, or raise the first exception.
    """
    results: list[Any] = [None] * len(actions)
    problems: list[BaseException] = []
    barrier = threading.Barrier(len(actions))

    def run(index: int) -> None:
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
                checked = CheckedEngine(client, clock=clocks[index] if clocks else None, **options)
                barrier.wait(60)
                results[index] = actions[index](checked)
        except BaseException as problem:  # noqa: BLE001  (reported in the test's thread)
            problems.append(problem)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if problems:
        raise min(problems, key=lambda problem: isinstance(problem, threading.BrokenBarrierError))
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    return results


def result_or_error(call: ScriptCall[T]) -> T | errors.CodeqError:
    try:
        return call.run_sync()
    except errors.CodeqError as error:
        return error


def wait_randomly(dice: random.Random, max_us: int = 300) -> None:
    """Wait for a random time, so that the order of the threads varies."""
    deadline = time.perf_counter() + dice.randrange(max_us) / 1e6
    while time.perf_counter() < deadline:
        pass
