"""Metrics of ranked queues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.db import InterfaceError, OperationalError, close_old_connections

from core import metrics
from core.metrics import GaugeMetricFamily
from ranked.models import RankedEntry


@metrics.at_scrape
def waiting_entries(until: float) -> Iterator[GaugeMetricFamily]:
    """Yield the number of entries that Redis does not have yet.

    If the database is unavailable, the scrape omits this gauge.
    """
    with contextlib.suppress(OperationalError, InterfaceError):
        close_old_connections()
        count = RankedEntry.objects.count()
        yield GaugeMetricFamily("codeq_ranked_waiting", "Entries of ranked queues not in Redis yet.", value=count)
