"""The retry schedule: delays, `Retry-After`, and when a delivery is given up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from core.conf import conf
from tests.webhooks.conftest import Configure
from webhooks import retry_schedule
from webhooks.retry_schedule import Verdict

NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def decide(
    attempt: int, status: int | None = 500, retry_after: str = "", rand: float = 0.5
) -> retry_schedule.RetryDecision:
    return retry_schedule.decide(attempt, status, retry_after, NOON, rand=lambda: rand)


def delay_seconds(decision: retry_schedule.RetryDecision) -> float:
    assert decision.due_at
    return (decision.due_at - NOON).total_seconds()


@pytest.mark.spec("WHK-3", "A failed callback is retried after 2, 4, 8 and 16 s, then in a tail of a day")
def test_delays_grow_until_the_delivery_is_given_up() -> None:
    delays = [delay_seconds(decide(attempt)) for attempt in range(1, 12)]
    assert delays == [2, 4, 8, 16, 300, 900, 3600, 7200, 14_400, 28_800, 32_400]
    assert sum(delays) > DAY.total_seconds()
    assert decide(12).verdict is Verdict.GIVEN_UP


def test_delays_are_settings(configure: Configure) -> None:
    configure(quick_attempts=8, retry_base_seconds=1, retry_cap_seconds=20, retry_tail_delays_seconds=[])
    assert retry_schedule.delays_seconds(conf().webhooks) == [1, 2, 4, 8, 16, 20, 20]
    assert decide(8).verdict is Verdict.GIVEN_UP


def test_delay_is_spread_by_a_tenth() -> None:
    assert [delay_seconds(decide(4, rand=rand)) for rand in (0.0, 0.5, 1.0)] == pytest.approx([14.4, 16, 17.6])


@pytest.mark.parametrize("status", [200, 201, 204, 299])
def test_2xx_means_delivered(status: int) -> None:
    assert decide(1, status).verdict is Verdict.DELIVERED


@pytest.mark.parametrize("status", [None, 100, 199, 301, 302, 307, 308, 400, 401, 403, 404, 408, 429, 500, 503, 599])
def test_other_statuses_are_retried(status: int | None) -> None:
    assert decide(1, status).verdict is Verdict.RETRY


def test_410_means_gone() -> None:
    assert decide(1, 410).verdict is Verdict.GONE


@pytest.mark.spec("WHK-3", "Retry-After is honoured for 429 and 503, within a day")
@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("120", 120),
        (" 7 ", 7),
        ("0", 1),
        ("1000000000", 86_400),
        ("9" * 400, 86_400),
        (format_datetime(NOON + timedelta(seconds=90), usegmt=True), 90),
        (format_datetime(NOON + timedelta(days=9), usegmt=True), 86_400),
        (format_datetime(NOON - timedelta(days=9), usegmt=True), 2),
        ("-5", 2),
        ("1.5", 2),
        ("soon", 2),
        ("", 2),
        ("Fri, 99 Foo 2026 99:99:99 GMT", 2),
        ("\u0661\u0662", 2),
        ("1e9", 2),
    ],
)
def test_retry_after_is_honoured_within_bounds(retry_after: str, seconds: float) -> None:
    for status in (429, 503):
        assert delay_seconds(decide(1, status, retry_after)) == seconds
    assert delay_seconds(decide(1, 500, retry_after)) == 2


def test_retry_after_grants_no_further_attempt() -> None:
    assert decide(12, 503, "10").verdict is Verdict.GIVEN_UP
