"""Writes down, each minute, how deep the queues are and what came and went: what charts and rates are made of."""

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
Queue = tuple[str, str]  # tid, command

MINUTE = timedelta(minutes=1)
# What the audit stores of a minute comes a moment after it: the drain's second, and one that was busy.
SETTLED = timedelta(seconds=15)
# A queue that does not change gets a row this often; without one for LOOKBACK it counts as empty.
UNCHANGED = timedelta(minutes=30)
LOOKBACK = timedelta(hours=1)
KEPT = timedelta(days=8)  # the longest chart shows seven
TENANTS = 200  # together
DELETED_AT_ONCE = 10_000


class Depth(NamedTuple):
    ready: int
    delayed: int
    in_progress: int
    dead: int

    @property
    def backlog(self) -> int:
        """Everything that has not ended."""
        return self.ready + self.delayed + self.in_progress


class Flow(NamedTuple):
    completed: int = 0
    failed: int = 0
    died: int = 0
    returned: int = 0
    cancelled: int = 0
    waits: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        return self.completed + self.failed + self.died + self.cancelled


ENDED = f"""
    SELECT tenant_id, command, outcome, status, {histogram.SQL.format("claimed_at - visible_at")},
           {histogram.SQL.format("ended_at - claimed_at")}, count(*)
    FROM queues_attempt
    WHERE ended_at >= %s AND ended_at < %s
    GROUP BY 1, 2, 3, 4, 5, 6
"""  # noqa: S608 - made of constants
NOTHING = Depth(0, 0, 0, 0)
STILL = Flow()


def sample(may_go_on: MayContinue, now: datetime | None = None) -> tuple[int, int]:
    """Write this minute's samples, once however often it is asked, and drop old ones; how many of each."""
    at = (now or datetime.now(UTC)).replace(second=0, microsecond=0)
    last = QueueSample.objects.filter(at__gt=at - LOOKBACK).order_by("-at").values_list("at", flat=True).first()
    if last == at:
        return 0, 0
    before = latest(at)
    flows = flows_between((last or at - MINUTE) - SETTLED, at - SETTLED)
    rows = []
    for tid, queue in _queues(may_go_on):
        key = (tid, queue.command)
        depth = Depth(queue.ready, queue.delayed, queue.in_progress, queue.dlq)
        flow, was = flows.get(key, STILL), before.get(key)
        since = was.at if was else None
        known = Depth(was.ready, was.delayed, was.in_progress, was.dead) if was else NOTHING
        if depth == known and flow == STILL and (depth == NOTHING or (since and since > at - UNCHANGED)):
            continue
        rows.append(
            QueueSample(
                tenant_id=tid,
                command=queue.command,
                at=at,
                **depth._asdict(),
                oldest_ready_seconds=_age(queue, at),
                # Nobody sampled before: what is there need not have come this minute.
                arrived=depth.backlog - known.backlog + flow.left if last else flow.left,
                **(flow._asdict() | {"waits": list(flow.waits), "runs": list(flow.runs)}),
            )
        )
    QueueSample.objects.bulk_create(rows, batch_size=1000, ignore_conflicts=True)
    return len(rows), prune(at - KEPT, may_go_on)


def latest(at: datetime, tids: Iterable[str] | None = None) -> dict[Queue, QueueSample]:
    """Each queue's last sample in the hour before, by queue."""
    rows = QueueSample.objects.filter(at__gt=at - LOOKBACK, at__lte=at)
    if tids is not None:
        rows = rows.filter(tenant_id__in=tids)
    newest = rows.order_by("tenant_id", "command", "-at").distinct("tenant_id", "command")
    return {(str(row.tenant_id), row.command): row for row in newest}


def flows_between(since: datetime, until: datetime) -> dict[Queue, Flow]:
    """What ended in each queue from `since` on and before `until`, and how long that had waited and run."""
    kinds: dict[Queue, Counter[str]] = defaultdict(Counter)
    waits: dict[Queue, Counter[int]] = defaultdict(Counter)
    runs: dict[Queue, Counter[int]] = defaultdict(Counter)
    with connection.cursor() as cursor:
        cursor.execute(ENDED, [since, until])
        for tid, command, outcome, status, wait, run, count in cursor:
            kinds[tid, command][_kind(outcome, status)] += count
            if wait is not None:
                waits[tid, command][wait] += count
                runs[tid, command][run] += count
    # Nobody worked on these, so they are no attempts.
    withdrawn = (
        AuditedResult.objects.filter(ended_at__gte=since, ended_at__lt=until, outcome=Outcome.CANCELLED, deliveries=0)
        .values_list("tenant_id", "command")
        .annotate(count=Count("pk"))
    )
    for tid, command, count in withdrawn:
        kinds[tid, command]["cancelled"] += count
    return {
        queue: Flow(**found, waits=tuple(histogram.pack(waits[queue])), runs=tuple(histogram.pack(runs[queue])))
        for queue, found in kinds.items()
    }


def prune(before: datetime, may_go_on: MayContinue) -> int:
    """Delete the samples of the time before, a piece at a time: a long delete would hold up the others."""
    deleted = 0
    while may_go_on():
        with connection.cursor() as cursor:
            cursor.execute(
                "DELETE FROM queues_queuesample WHERE id IN "
                "(SELECT id FROM queues_queuesample WHERE at < %s ORDER BY at LIMIT %s)",
                [before, DELETED_AT_ONCE],
            )
            went = cursor.rowcount
        deleted += went
        if went < DELETED_AT_ONCE:
            break
    return deleted


def _kind(outcome: str, status: str) -> str:
    if outcome == Outcome.COMPLETED:
        return "completed"
    if outcome == Outcome.CANCELLED:
        return "cancelled"
    if outcome == Outcome.FAILED:
        return "failed"
    return "died" if status == TaskStatus.FAILED else "returned"


def _queues(may_go_on: MayContinue) -> Iterator[tuple[str, QueueStats]]:
    for partition in reachable_partitions():
        tids = client().sscan_iter(keys.of_partition(partition).tenants, count=1000)
        while chunk := [tid.decode() for tid in islice(tids, TENANTS)]:
            if not may_go_on():
                return
            for tid, queues in selectors.queues_of(chunk).run_sync().items():
                for queue in queues:
                    yield tid, queue


def _age(queue: QueueStats, at: datetime) -> float | None:
    if queue.oldest_ready_ms is None:
        return None
    return max(0.0, at.timestamp() - queue.oldest_ready_ms / 1000)
