"""Names of the locks that are kept in Redis."""

from __future__ import annotations

from core.redis.partitions import partition_root


def lock_key(task_name: str, partition: int = 0) -> str:
    """Return the key of the lock that lets one run of a periodic task work at a time."""
    return f"{partition_root(partition)}lock:{task_name}"
