"""Partitions: the hash tag that keeps all keys of a tenant in one slot of a Redis Cluster."""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

# The key that holds the number of partitions, written at the first start.
PARTITIONS_KEY = "codeq:partitions"


@lru_cache(maxsize=100_000)
def partition_of(tid: str, partitions: int) -> int:
    """Return the partition of a tenant."""
    return crc32(tid.encode()) % partitions


def partition_root(partition: int) -> str:
    """Return the prefix of every key of a partition, with its hash tag."""
    return f"codeq:{{{partition}}}:"
