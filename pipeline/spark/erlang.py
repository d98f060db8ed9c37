"""Waiting in closed form: what `capacity` advises with and what the simulator is checked against."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_WORKERS = 100_000


def waiting_probability(load: float, workers: int) -> float:
    """Erlang C: the share of arrivals that find all workers busy (M/M/c). `load` is arrival rate x service time."""
    if load <= 0:
        return 0.0
    if load >= workers:
        return 1.0
    blocked = 1.0  # Erlang B by its recurrence, which does not overflow
    for c in range(1, workers + 1):
        blocked = load * blocked / (c + load * blocked)
    return blocked / (1 - load / workers * (1 - blocked))


def mean_wait(rate: float, service_seconds: float, workers: int, cv2: float = 1.0) -> float:
    """The mean wait in seconds; infinite where the workers cannot keep up.

    `cv2` is the squared coefficient of variation of the service time: 1 is exponential and exact, another one makes
    it the Allen-Cunneen approximation of M/G/c.
    """
    load = rate * service_seconds
    if load >= workers:
        return float("inf")
    return (1 + cv2) / 2 * waiting_probability(load, workers) * service_seconds / (workers - load)


def workers_needed(rate: Any, service_seconds: Any, cv2: Any, target_seconds: float) -> Any:
    """The fewest workers, for each of these queues, that keep the mean wait at the target or below.

    One pass over c for all queues at once: Erlang B of c + 1 comes from that of c.
    """
    rate, service, cv2 = (np.asarray(values, dtype=float) for values in (rate, service_seconds, cv2))
    load = rate * service
    needed = np.zeros(load.shape, dtype=np.int32)
    blocked = np.ones(load.shape)
    waiting = (load > 0) & (load < MOST_WORKERS)
    needed[load >= MOST_WORKERS] = MOST_WORKERS
    c = 0
    while waiting.any():
        c += 1
        blocked = load * blocked / (c + load * blocked)
        spare = c - load
        with np.errstate(divide="ignore", invalid="ignore"):
            waits = blocked / (1 - load / c * (1 - blocked))
            wait = (1 + cv2) / 2 * waits * service / spare
        done = waiting & (spare > 0) & (wait <= target_seconds)
        needed[done] = c
        waiting &= ~done
    return needed
