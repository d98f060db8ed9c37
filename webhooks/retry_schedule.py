"""The retry schedule of deliveries: quick attempts, a long tail, then giving up.

The default settings give this schedule:

attempt    1    2    3    4    5     6     7    8    9    10   11   12
delay      0    2 s  4 s  8 s  16 s  5 m   15 m 1 h  2 h  4 h  8 h  9 h     in total a little more than a day
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import NamedTuple

from core.conf import Webhooks, conf

# Bounds of an endpoint's `Retry-After`.
RETRY_AFTER_MAX = timedelta(hours=24)
RETRY_AFTER_MIN = timedelta(seconds=1)
JITTER = 0.1  # spreads the retries of deliveries that failed at the same time

Random = Callable[[], float]


class Verdict(StrEnum):
    """The outcome of an attempt for its delivery."""

    DELIVERED = "delivered"
    RETRY = "retry"
    GIVEN_UP = "given up"
    GONE = "gone"  # 410: the endpoint asks not to be called again


class RetryDecision(NamedTuple):
    """The verdict on an attempt and, if it is RETRY, the time of the next attempt."""

    verdict: Verdict
    due_at: datetime | None = None


def decide(
    attempt: int,
    status: int | None,
    retry_after: str,
    now: datetime,
    *,
    rand: Random = random.random,
) -> RetryDecision:
    """Decide what follows an attempt. The first attempt has number 1.

    `status` is None if there was no response.
    """
    if status is not None and 200 <= status < 300:
        return RetryDecision(Verdict.DELIVERED)
    if status == 410:
        return RetryDecision(Verdict.GONE)
    delays = delays_seconds(conf().webhooks)
    if attempt > len(delays):
        return RetryDecision(Verdict.GIVEN_UP)
    requested_delay = parse_retry_after(retry_after, now) if status in (429, 503) else None
    if requested_delay is not None:
        return RetryDecision(Verdict.RETRY, now + requested_delay)
    factor = 1 - JITTER + 2 * JITTER * rand()
    return RetryDecision(Verdict.RETRY, now + timedelta(seconds=delays[attempt - 1] * factor))


def delays_seconds(settings: Webhooks) -> list[float]:
    """Return the delay after each attempt except the last."""
    quick = [
        min(settings.retry_base_seconds * 2**n, settings.retry_cap_seconds) for n in range(settings.quick_attempts - 1)
    ]
    return quick + settings.retry_tail_delays_seconds


def parse_retry_after(value: str, now: datetime) -> timedelta | None:
    """Return the delay that a `Retry-After` header requests, None if it is invalid or past.

    The header has a number of seconds or a date. The delay is clamped to `RETRY_AFTER_MIN` and `RETRY_AFTER_MAX`.
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        delay = timedelta(seconds=min(int(value[:12]), RETRY_AFTER_MAX.total_seconds()))
    else:
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, TypeError):
            return None
        delay = (date if date.tzinfo else date.replace(tzinfo=UTC)) - now
        if delay < timedelta(0):
            return None
    return max(RETRY_AFTER_MIN, min(delay, RETRY_AFTER_MAX))
