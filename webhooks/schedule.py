"""When a delivery is tried again, as data: a few quick tries, then a long tail, then it is given up.

try        1    2    3    4    5     6     7    8    9    10   11   12
after      0    2 s  4 s  8 s  16 s  5 m   15 m 1 h  2 h  4 h  8 h  9 h     in all a little more than a day
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import NamedTuple

from core.conf import Webhooks, conf

# An endpoint may ask for a pause, but not for ever.
RETRY_AFTER_LIMIT = timedelta(hours=24)
RETRY_AFTER_LEAST = timedelta(seconds=1)
JITTER = 0.1  # so that what failed together does not come back together

Random = Callable[[], float]


class Verdict(StrEnum):
    DELIVERED = "delivered"
    RETRY = "retry"
    GIVEN_UP = "given up"
    GONE = "gone"  # 410: the endpoint asks never to be called again


class Step(NamedTuple):
    verdict: Verdict
    due_at: datetime | None = None


def after(
    tries: int,
    status: int | None,
    retry_after: str,
    now: datetime,
    *,
    rand: Random = random.random,
) -> Step:
    """What follows the try number `tries` (1 = the first) that ended with this status, or without one."""
    if status is not None and 200 <= status < 300:
        return Step(Verdict.DELIVERED)
    if status == 410:
        return Step(Verdict.GONE)
    delays = delays_seconds(conf().webhooks)
    if tries > len(delays):
        return Step(Verdict.GIVEN_UP)
    asked = pause(retry_after, now) if status in (429, 503) else None
    if asked is not None:
        return Step(Verdict.RETRY, now + asked)
    factor = 1 - JITTER + 2 * JITTER * rand()
    return Step(Verdict.RETRY, now + timedelta(seconds=delays[tries - 1] * factor))


def delays_seconds(settings: Webhooks) -> list[float]:
    """The pause after each try but the last."""
    quick = [min(settings.retry_base_seconds * 2**n, settings.retry_cap_seconds) for n in range(settings.tries - 1)]
    return quick + settings.tail_seconds


def pause(retry_after: str, now: datetime) -> timedelta | None:
    """What `Retry-After` says, in seconds or as a date, kept within limits; None when it says nothing sensible."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        asked = timedelta(seconds=min(int(text[:12]), RETRY_AFTER_LIMIT.total_seconds()))
    else:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, TypeError):
            return None
        asked = (date if date.tzinfo else date.replace(tzinfo=UTC)) - now
        if asked < timedelta(0):
            return None
    return max(RETRY_AFTER_LEAST, min(asked, RETRY_AFTER_LIMIT))
