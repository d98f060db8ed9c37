"""A Bloom filter that forgets: two generations, of which the older goes when the newer has served its time.

What was added is found for at least one rotation and at most two; what was not is found with the stated rate. A
generation takes no more than it was sized for, so the rate holds whatever is thrown at it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rbloom import Bloom


class RotatingFilter:
    """A filter of capacity 0 contains nothing.

    Thread-safe: `rbloom` does each operation under the interpreter's lock; rotation has a lock of its own."""

    def __init__(
        self, capacity: int, rate: float, rotate_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity, self.rate, self.rotate_seconds = capacity, rate, rotate_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._rotates_at = clock() + rotate_seconds
        self._current, self._previous = self._create(), self._create()
        self._room = capacity

    def add(self, key: str) -> None:
        """Remember the key; a full generation ignores it, since forgetting costs a round trip and lying an answer."""
        self._rotate_when_due()
        if self._room > 0 and key not in self._current:
            self._current.add(key)
            self._room -= 1

    def __contains__(self, key: str) -> bool:
        self._rotate_when_due()
        return key in self._current or key in self._previous

    @property
    def bytes(self) -> int:
        return (self._current.size_in_bits + self._previous.size_in_bits) // 8

    def _rotate_when_due(self) -> None:
        now = self._clock()
        if now < self._rotates_at:
            return
        with self._lock:
            if now < self._rotates_at:
                return
            slept_through = now >= self._rotates_at + self.rotate_seconds
            self._previous = self._create() if slept_through else self._current
            self._current = self._create()
            self._room = self.capacity
            self._rotates_at = now + self.rotate_seconds

    def _create(self) -> Bloom:
        return Bloom(max(1, self.capacity), self.rate)  # rbloom has no empty filter
