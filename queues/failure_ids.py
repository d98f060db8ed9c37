"""Failure ids: 64-bit numbers that identify the kind of error of a dead letter."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b

from core.failure_fingerprint import fingerprint

_is_text = re.compile("[0-9a-fA-F]{16}").fullmatch


@lru_cache(maxsize=10_000)
def failure_id(command: str, error: str) -> int:
    """Return the id of a failure, a signed 64-bit hash of its fingerprint.

    It is short enough for an index. With a million different failures of one tenant, the probability that two of them
    share an id is about 10^-8.
    """
    digest = blake2b(fingerprint(command, error).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def to_text(number: int) -> str:
    """Return the id as pages and the API show it: 16 hexadecimal digits."""
    return f"{number & (2**64 - 1):016x}"


def from_text(text: str) -> int:
    """Parse the text that `to_text` returns. Raises ValueError for a text of another form."""
    if not _is_text(text):
        raise ValueError(f"not a failure id: {text!r}")
    number = int(text, 16)
    return number - 2**64 if number >= 2**63 else number
