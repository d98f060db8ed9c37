"""Metrics of tasks and queues.

Labels contain commands, never tenants, because a scraper must not learn which tenants exist.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import redis
from django.conf import settings
from django.db import InterfaceError, OperationalError, close_old_connections

from core import metrics
from core.conf import conf
from core.errors import Unavailable
from core.metrics import BufferedCounter, Counter, GaugeMetricFamily, Histogram
from core.redis.connections import client, reachable_partitions
from queues import selectors
from queues.audit import stream
from queues.audit.events import Event
from queues.domain import TERMINAL, Outcome
from queues.engine import keys
from queues.models import PeriodicTaskRun, Quarantine

_created = Counter("codeq_task_created_total", "Tasks enqueued.", ["command"])
_claimed = Counter("codeq_task_claimed_total", "Tasks claimed.", ["command"])
_completed = Counter("codeq_task_completed_total", "Tasks that ended, by status.", ["command", "status"])
_lease_expired = Counter("codeq_lease_expired_total", "Leases that expired.", ["command"])
_latency = Histogram(
    "codeq_task_processing_latency_seconds",
    "Seconds from the creation of a task to its result.",
    ["command", "status"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86_400),
)
# Tenants whose queues are read in one call.
TENANTS_AT_ONCE = 100
# Counted in the web processes, by command: `metrics.claimed.add(task.spec.command)`.
created, claimed = BufferedCounter(_created), BufferedCounter(_claimed)


def ended(events: Iterable[Event]) -> None:
    """Count the events that the drain has read.

    They are counted here because only the stream has every ended attempt exactly once.
    """
    latencies_ms: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for event in events:
        latencies_ms[event.command, event.outcome, event.status].append(event.ended_ms - event.created_ms)
    for (name, outcome, status), latencies in latencies_ms.items():
        command = metrics.label(name)
        if outcome == Outcome.EXPIRED:
            _lease_expired.labels(command).inc(len(latencies))
        if status in TERMINAL:
            _completed.labels(command, status).inc(len(latencies))
        if outcome in (Outcome.COMPLETED, Outcome.FAILED):
            observe = _latency.labels(command, status).observe
            for latency_ms in latencies:
                observe(max(0, latency_ms) / 1000)


@metrics.at_scrape
def depths(until: float) -> Iterator[GaugeMetricFamily]:
    """Depths of all queues, summed over tenants.

    Every process reports the same values: aggregate them with `max`, not with `sum`.
    """
    counts_by_command: dict[str, list[int]] = {}
    is_complete = 1
    try:
        tids = list(_tenants())
        is_complete = int(len(reachable_partitions()) == conf().queues.partitions)
        for at in range(0, len(tids), TENANTS_AT_ONCE):
            if time.monotonic() > until:
                is_complete = 0
                break
            by_tenant = selectors.queues_of(tids[at : at + TENANTS_AT_ONCE]).run_sync()
            for queue in (queue for queues in by_tenant.values() for queue in queues):
                counts = counts_by_command.setdefault(metrics.label(queue.command), [0, 0, 0, 0])
                for index, count in enumerate((queue.ready, queue.delayed, queue.in_progress, queue.dlq)):
                    counts[index] += count
    except (Unavailable, redis.RedisError):
        is_complete = 0
    depth = GaugeMetricFamily("codeq_queue_depth", "Tasks in the queues.", labels=["command", "queue"])
    dead = GaugeMetricFamily("codeq_dlq_depth", "Dead letters.", labels=["command"])
    for command, counts in sorted(counts_by_command.items()):
        for name, count in zip(("ready", "delayed", "in_progress", "dlq"), counts, strict=True):
            depth.add_metric([command, name], count)
        dead.add_metric([command], counts[3])
    yield depth
    yield dead
    yield GaugeMetricFamily("codeq_depths_complete", "1 if every queue was read in time.", value=is_complete)


@metrics.at_scrape
def audit(until: float) -> Iterator[GaugeMetricFamily]:
    """Lag and quarantine of the audit. A value is left out while its server is unavailable."""
    with contextlib.suppress(Unavailable, redis.RedisError):
        yield GaugeMetricFamily(
            "codeq_audit_lag", "Entries of the events stream that are not in PostgreSQL yet.", value=stream.lag()
        )
    with contextlib.suppress(OperationalError, InterfaceError):
        close_old_connections()
        count = Quarantine.objects.count()
        yield GaugeMetricFamily("codeq_audit_quarantine", "Entries that cannot be stored.", value=count)


@metrics.at_scrape
def beat(until: float) -> Iterator[GaugeMetricFamily]:
    """Seconds for which each periodic task has been due.

    A task is due one period after the start of its last recorded run (`PeriodicTaskRun.next_at`). A periodic task that
    never ran is left out.
    """
    with contextlib.suppress(OperationalError, InterfaceError):
        close_old_connections()
        rows = PeriodicTaskRun.objects.filter(name__in=settings.PERIODIC_TASKS)
        late = GaugeMetricFamily(
            "codeq_beat_late_seconds", "Seconds for which a periodic task has been due.", labels=["name"]
        )
        now = datetime.now(UTC)
        for run in rows:
            late.add_metric([run.name], max(0.0, (now - run.next_at).total_seconds()))
        yield late


def _tenants() -> Iterator[str]:
    for partition in reachable_partitions():
        for tid in client().sscan_iter(keys.of_partition(partition).tenants, count=1000):
            yield tid.decode()
