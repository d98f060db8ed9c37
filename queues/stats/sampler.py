"""Write a sample of each queue every minute, from which charts and rates are computed.

A sample has the queue's depths, and the numbers of arrivals and endings since the previous sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

from django.db import connection
from django.db.models import Count

from core.redis.connections import client, reachable_partitions
from queues import selectors
from queues.domain import Outcome, QueueStats, TaskStatus
from queues.engine import keys
from queues.models import AuditedResult, QueueSample
from queues.stats import histogram

MayContinue = Callable[[], bool]
QueueKey = tuple[str, str]  # tid, command

MINUTE = timedelta(minutes=1)
# The audit is behind Redis by the drain's interval of a second, or more when the drain is busy.
AUDIT_DELAY = timedelta(seconds=15)
# An unchanged queue gets a sample at this interval. A queue without one for LOOKBACK is empty.
UNCHANGED_INTERVAL = timedelta(minutes=30)
LOOKBACK = timedelta(hours=1)
RETENTION = timedelta(days=8)  # the longest chart shows seven
TENANTS_PER_CALL = 200
ROWS_PER_DELETE = 10_000


class QueueDepths(NamedTuple):
    """The numbers of tasks in a queue by state."""

    ready: int
    delayed: int
    in_progress: int
    dead: int

    @property
    def backlog(self) -> int:
        """The number of tasks that have not ended."""
        return self.ready + self.delayed + self.in_progress


class EndedCounts(NamedTuple):
    """The numbers of a queue's ended attempts by outcome, and histograms of their times."""

    completed: int = 0
    failed: int = 0
    died: int = 0
    returned: int = 0
    cancelled: int = 0
    waits: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()

    @property
    def ended_tasks(self) -> int:
        return self.completed + self.failed + self.died + self.cancelled


ENDED_SQL = f"""
    SELECT tenant_id, command, outcome, status, {histogram.BIN_SQL.format("claimed_at - visible_at")},
           {histogram.BIN_SQL.format("ended_at - claimed_at")}, count(*)
    FROM queues_attempt
    WHERE ended_at >= %s AND ended_at < %s
    GROUP BY 1, 2, 3, 4, 5, 6
"""  # noqa: S608 - only constants are inserted
EMPTY = QueueDepths(0, 0, 0, 0)
NO_ENDINGS = EndedCounts()


def sample(may_continue: MayContinue, now: datetime | None = None) -> tuple[int, int]:
    """Write this minute's samples and delete old ones. Return the numbers of both.

    A second call in the same minute does nothing.
    """
    at = (now or datetime.now(UTC)).replace(second=0, microsecond=0)
    last = QueueSample.objects.filter(at__gt=at - LOOKBACK).order_by("-at").values_list("at", flat=True).first()
    if last == at:
        return 0, 0
    previous_samples = read_latest(at)
    ended_by_queue = count_ended((last or at - MINUTE) - AUDIT_DELAY, at - AUDIT_DELAY)
    rows = []
    for tid, queue in _list_queues(may_continue):
        key = (tid, queue.command)
        depths = QueueDepths(queue.ready, queue.delayed, queue.in_progress, queue.dlq)
        ended, previous = ended_by_queue.get(key, NO_ENDINGS), previous_samples.get(key)
        if previous:
            previous_depths = QueueDepths(previous.ready, previous.delayed, previous.in_progress, previous.dead)
        else:
            previous_depths = EMPTY
        is_recent = previous is not None and previous.at > at - UNCHANGED_INTERVAL
        if depths == previous_depths and ended == NO_ENDINGS and (depths == EMPTY or is_recent):
            continue
        rows.append(
            QueueSample(
                tenant_id=tid,
                command=queue.command,
                at=at,
                **depths._asdict(),
                oldest_ready_seconds=_age_of_oldest(queue, at),
                # Without any earlier sample, it is not known when the waiting tasks arrived.
                arrived=depths.backlog - previous_depths.backlog + ended.ended_tasks if last else ended.ended_tasks,
                **(ended._asdict() | {"waits": list(ended.waits), "runs": list(ended.runs)}),
            )
        )
    QueueSample.objects.bulk_create(rows, batch_size=1000, ignore_conflicts=True)
    return len(rows), prune(at - RETENTION, may_continue)


def read_latest(at: datetime, tids: Iterable[str] | None = None) -> dict[QueueKey, QueueSample]:
    """Return each queue's last sample of the hour before `at`."""
    rows = QueueSample.objects.filter(at__gt=at - LOOKBACK, at__lte=at)
    if tids is not None:
        rows = rows.filter(tenant_id__in=tids)
    newest = rows.order_by("tenant_id", "command", "-at").distinct("tenant_id", "command")
    return {(str(row.tenant_id), row.command): row for row in newest}


def count_ended(since: datetime, until: datetime) -> dict[QueueKey, EndedCounts]:
    """Count the attempts that ended in each queue from `since` on and before `until`."""
    counts_by_queue: dict[QueueKey, Counter[str]] = defaultdict(Counter)
    waits: dict[QueueKey, Counter[int]] = defaultdict(Counter)
    runs: dict[QueueKey, Counter[int]] = defaultdict(Counter)
    with connection.cursor() as cursor:
        cursor.execute(ENDED_SQL, [since, until])
        for tid, command, outcome, status, wait, run, count in cursor:
            counts_by_queue[tid, command][_find_column(outcome, status)] += count
            if wait is not None:
                waits[tid, command][wait] += count
                runs[tid, command][run] += count
    # Tasks that were cancelled while they waited have no attempt.
    cancelled_tasks = (
        AuditedResult.objects.filter(ended_at__gte=since, ended_at__lt=until, outcome=Outcome.CANCELLED, deliveries=0)
        .values_list("tenant_id", "command")
        .annotate(count=Count("pk"))
    )
    for tid, command, count in cancelled_tasks:
        counts_by_queue[tid, command]["cancelled"] += count
    return {
        queue: EndedCounts(**counts, waits=tuple(histogram.pack(waits[queue])), runs=tuple(histogram.pack(runs[queue])))
        for queue, counts in counts_by_queue.items()
    }


def prune(before: datetime, may_continue: MayContinue) -> int:
    """Delete older samples, and return their number.

    Each statement deletes at most ROWS_PER_DELETE rows, because a long one would delay other periodic tasks.
    """
    deleted = 0
    while may_continue():
        with connection.cursor() as cursor:
            cursor.execute(
                "DELETE FROM queues_queuesample WHERE id IN "
                "(SELECT id FROM queues_queuesample WHERE at < %s ORDER BY at LIMIT %s)",
                [before, ROWS_PER_DELETE],
            )
            deleted_now = cursor.rowcount
        deleted += deleted_now
        if deleted_now < ROWS_PER_DELETE:
            break
    return deleted


def _find_column(outcome: str, status: str) -> str:
    """Return the column of QueueSample that counts an attempt with this outcome and status."""
    if outcome == Outcome.COMPLETED:
        return "completed"
    if outcome == Outcome.CANCELLED:
        return "cancelled"
    if outcome == Outcome.FAILED:
        return "failed"
    return "died" if status == TaskStatus.FAILED else "returned"


def _list_queues(may_continue: MayContinue) -> Iterator[tuple[str, QueueStats]]:
    for partition in reachable_partitions():
        tids = client().sscan_iter(keys.of_partition(partition).tenants, count=1000)
        while chunk := [tid.decode() for tid in islice(tids, TENANTS_PER_CALL)]:
            if not may_continue():
                return
            for tid, queues in selectors.queues_of(chunk).run_sync().items():
                for queue in queues:
                    yield tid, queue


def _age_of_oldest(queue: QueueStats, at: datetime) -> float | None:
    if queue.oldest_ready_ms is None:
        return None
    return max(0.0, at.timestamp() - queue.oldest_ready_ms / 1000)
