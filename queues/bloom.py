"""A Bloom filter that forgets old keys.

It has two generations. At each rotation the older one is dropped, so a key is remembered for at least one rotation
period, and for less than three: a rotation that is due waits for the next use of the filter. A generation accepts no
more keys than its capacity, so the rate of false positives never rises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rbloom import Bloom


class RotatingFilter:
    """A Bloom filter of two generations. With a capacity of 0 it contains nothing.

    It is thread-safe: `rbloom` runs each operation under the interpreter's lock, and rotation takes a lock of its own.
    """

    def __init__(
        self,
        capacity: int,
        false_positive_rate: float,
        rotate_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity, self.false_positive_rate, self.rotate_seconds = capacity, false_positive_rate, rotate_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._rotates_at = clock() + rotate_seconds
        self._current, self._previous = self._create(), self._create()
        self._free = capacity

    def add(self, key: str) -> None:
        """Remember the key, unless the generation is full.

        A key that is not remembered costs one round trip. Keys above the capacity would cause more false positives.
        """
        self._rotate_when_due()
        if self._free > 0 and key not in self._current:
            self._current.add(key)
            self._free -= 1

    def __contains__(self, key: str) -> bool:
        self._rotate_when_due()
        return key in self._current or key in self._previous

    @property
    def size_bytes(self) -> int:
        """The memory of both generations."""
        return (self._current.size_in_bits + self._previous.size_in_bits) // 8

    def _rotate_when_due(self) -> None:
        now = self._clock()
        if now < self._rotates_at:
            return
        with self._lock:
            if now < self._rotates_at:
                return
            missed_rotation = now >= self._rotates_at + self.rotate_seconds
            self._previous = self._create() if missed_rotation else self._current
            self._current = self._create()
            self._free = self.capacity
            self._rotates_at = now + self.rotate_seconds

    def _create(self) -> Bloom:
        return Bloom(max(1, self.capacity), self.false_positive_rate)  # rbloom has no empty filter
