"""Options of the engine, rate limits, and the bounds of one script."""

from __future__ import annotations

from functools import cached_property, lru_cache

import msgspec

from queues.engine import keys

# The most tasks in one command of the engine. It stays below the limit of Lua's `unpack`.
CHUNK = 1000
# The most tasks in one script that changes tasks for an operator or a periodic task. The command sends further scripts
# for the others. Redis runs nothing else meanwhile: for 100 tasks about a millisecond, and twice that if the script
# also returns the tasks.
PART = 100
PART_WITH_REPLY = 50
# The most queues in one claim, which reads ten lists per queue.
CLAIM_QUEUES = 100


class Options(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The settings of an installation.

    A queue's policy can override the attempts and the backoff, a tenant the retention of dead letters.
    """

    partitions: int = 16
    max_attempts: int = 5
    # One claim makes at most this many delayed tasks ready, and also ends at most this many expired leases.
    repair_limit: int = 200
    backoff: str = "exp_full_jitter"
    backoff_base_ms: int = 5_000
    backoff_cap_ms: int = 900_000
    dead_retention_ms: int = 7 * 86_400_000
    # How far ahead a task can be scheduled.
    horizon_ms: int = 366 * 86_400_000

    @cached_property
    def default_backoff(self) -> str:
        """The script argument `default_backoff`: "<backoff> <base ms> <cap ms>"."""
        return f"{self.backoff} {self.backoff_base_ms} {self.backoff_cap_ms}"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Rate limits of a tenant and of one of its tokens, for one kind of request.

    A rate of 0 means no limit. A token may use `token_percent` of the tenant's rate.
    """

    kind: str = ""
    per_second: float = 0
    burst_seconds: float = 2.0
    token: str = ""
    token_percent: int = 100

    def encode(self, root: str, tid: str) -> str:
        """Return the script argument `limits`: "<key> <ms per unit> <burst ms>" for each bucket."""
        return _encode_buckets(self, root, tid) if self.per_second else ""


@lru_cache(maxsize=10_000)
def _encode_buckets(limits: Limits, root: str, tid: str) -> str:
    price, burst = 1000 / limits.per_second, limits.burst_seconds * 1000
    buckets = [f"{keys.rate_limit(root, tid, limits.kind)} {price} {burst}"]
    if limits.token and limits.token_percent < 100:
        token_key = keys.rate_limit(root, tid, limits.kind, limits.token)
        buckets.append(f"{token_key} {price * 100 / limits.token_percent} {burst}")
    return " ".join(buckets)


NO_LIMITS = Limits()
