"""A lock that prevents concurrent runs of a periodic task.

It avoids duplicate work but guarantees nothing: a process that was frozen until its lock expired may continue beside
the next run. Every periodic task is therefore safe on its own (unique rows, reservations, atomic scripts).
"""

from __future__ import annotations

import logging
import time

import redis.exceptions
from redis.lock import Lock

from core.redis.connections import client, reachable_partitions
from core.redis.partitions import partition_root

log = logging.getLogger(__name__)


def lock_key(task_name: str, partition: int = 0) -> str:
    """Return the key of a periodic task's lock."""
    return f"{partition_root(partition)}lock:{task_name}"


class PeriodicTaskLock:
    """A held lock.

    Call `renew()` before each further piece of work, and stop when it returns False.
    """

    def __init__(self, lock: Lock, seconds: float) -> None:
        self._lock = lock
        self._seconds = seconds
        self._renewed_at = time.monotonic()

    @classmethod
    def acquire(cls, task_name: str, seconds: float) -> PeriodicTaskLock | None:
        """Return the lock, or None while another run holds it.

        The lock is kept in the first reachable partition, so that no periodic task stops because one primary of a
        cluster is down. If two processes disagree about which partition is the first, both run.
        """
        partitions = reachable_partitions()
        key = lock_key(task_name, partitions[0] if partitions else 0)
        lock = Lock(client(), key, timeout=seconds, blocking=False, thread_local=False)
        return cls(lock, seconds) if lock.acquire() else None

    def renew(self) -> bool:
        """Extend the lock. Return False if it has expired."""
        if time.monotonic() - self._renewed_at < self._seconds / 4:
            return True
        try:
            self._lock.extend(self._seconds, replace_ttl=True)
        except redis.exceptions.LockError:
            return False
        self._renewed_at = time.monotonic()
        return True

    def release(self) -> None:
        """Release the lock, so that the next run need not wait until it expires."""
        try:
            self._lock.release()
        except redis.exceptions.LockError:
            log.debug("the lock had expired already")
