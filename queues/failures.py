"""Which failure a dead letter is one of: a number for what the pipeline calls by name."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from pipeline.fingerprint import fingerprint as name_of


@lru_cache(maxsize=10_000)
def fingerprint(command: str, error: str) -> int:
    """The failure's number, 64 bit with a sign: as short in an index as such a thing can be. Two of a tenant's failures
    with one number come once in 10^8 installations with a million different failures each."""
    digest = blake2b(name_of(command, error).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def to_text(number: int) -> str:
    """A failure's number as it is shown and sent."""
    return f"{number & (2**64 - 1):016x}"


def from_text(text: str) -> int:
    """The other way. ValueError for what is none."""
    if len(text) != 16:
        raise ValueError(text)
    number = int(text, 16)
    return number - 2**64 if number >= 2**63 else number
