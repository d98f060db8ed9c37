"""Metrics that are read when Prometheus scrapes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from queues import metrics
from tests.factories import PeriodicTaskRunFactory


@pytest.mark.django_db(transaction=True)
def test_periodic_task_is_late_from_one_period_after_the_start_of_its_last_run() -> None:
    started_at = datetime.now(UTC) - timedelta(seconds=100)
    run = PeriodicTaskRunFactory(
        name="drain", every_seconds=30, started_at=started_at, ended_at=started_at + timedelta(seconds=50)
    )
    assert run.next_at == started_at + timedelta(seconds=30)
    [late] = metrics.beat(until=0)
    [sample] = late.samples
    assert sample.labels == {"name": "drain"}
    assert 70 <= sample.value < 100
