"""Many clients at once: a thread and a connection each, let go by one barrier."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from core import errors
from core.redis.script_call import ScriptCall
from tests.queues.engine.world import World

T = TypeVar("T")


def crowd(
    url: str, acts: Sequence[Callable[[World], T]], *, clocks: Sequence[Callable[[], int] | None] = (), **options: Any
) -> list[T]:
    """Run every act in a thread of its own, all starting together; their results in order, or the first exception."""
    results: list[Any] = [None] * len(acts)
    problems: list[BaseException] = []
    barrier = threading.Barrier(len(acts))

    def run(at: int) -> None:
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
                world = World(client, clock=clocks[at] if clocks else None, **options)
                barrier.wait(60)
                results[at] = acts[at](world)
        except BaseException as problem:  # noqa: BLE001  (shown in the test's own thread)
            problems.append(problem)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if problems:
        raise min(problems, key=lambda problem: isinstance(problem, threading.BrokenBarrierError))
    assert not any(thread.is_alive() for thread in threads), "somebody did not come to an end"
    return results


def outcome(call: ScriptCall[T]) -> T | errors.CodeqError:
    try:
        return call.run_sync()
    except errors.CodeqError as error:
        return error


def dawdle(dice: random.Random, most_us: int = 300) -> None:
    """Let the scheduler's habits not decide every race alike."""
    until = time.perf_counter() + dice.randrange(most_us) / 1e6
    while time.perf_counter() < until:
        pass
