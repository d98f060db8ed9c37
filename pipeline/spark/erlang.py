"""Queueing formulas, used by the mart `capacity` and by the simulator's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_WORKERS = 100_000


def waiting_probability(load: float, workers: int) -> float:
    """Return the share of arrivals that find all workers busy (Erlang C, M/M/c).

    `load` is arrival rate x service time.
    """
    if load <= 0:
        return 0.0
    if load >= workers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recurrence, which does not overflow
    for c in range(1, workers + 1):
        blocked = load * blocked / (c + load * blocked)
    return blocked / (1 - load / workers * (1 - blocked))


def mean_wait(rate: float, service_seconds: float, workers: int, cv2: float = 1.0) -> float:
    """Return the mean wait in seconds, or infinity if the workers cannot keep up.

    `cv2` is the squared coefficient of variation of the service time. The result is exact for 1, the exponential
    distribution. For other values it is the Allen-Cunneen approximation of M/G/c.
    """
    load = rate * service_seconds
    if load >= workers:
        return float("inf")
    return (1 + cv2) / 2 * waiting_probability(load, workers) * service_seconds / (workers - load)


def workers_needed(rate: Any, service_seconds: Any, cv2: Any, target_seconds: float) -> Any:
    """Return the fewest workers for each queue that keep the mean wait within the target.

    The result is at most MAX_WORKERS. One pass over c, the number of workers, serves all queues, because Erlang B of
    c + 1 is computed from that of c.
    """
    rate, service, cv2 = (np.asarray(values, dtype=float) for values in (rate, service_seconds, cv2))
    load = rate * service
    needed = np.zeros(load.shape, dtype=np.int32)
    blocked = np.ones(load.shape)
    is_open = (load > 0) & (load < MAX_WORKERS)
    needed[load >= MAX_WORKERS] = MAX_WORKERS
    c = 0
    while is_open.any():
        c += 1
        blocked = load * blocked / (c + load * blocked)
        idle = c - load
        with np.errstate(divide="ignore", invalid="ignore"):
            waiting = blocked / (1 - load / c * (1 - blocked))
            wait = (1 + cv2) / 2 * waiting * service / idle
        is_met = is_open & (idle > 0) & (wait <= target_seconds)
        needed[is_met] = c
        is_open &= ~is_met
    return needed
