"""The whole contents of Redis, to prove that a request changed nothing."""

from __future__ import annotations

from core.redis.connections import client


def dump_redis() -> dict[bytes, bytes]:
    """Return every key with its serialized value."""
    return {key: client().dump(key) for key in sorted(client().keys("*"))}  # type: ignore[misc, union-attr]
