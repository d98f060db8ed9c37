"""The data of the console's charts: a tenant's marts in steps of an hour or a day.

Counts of a step are summed. Quantiles cannot be combined, so a step longer than an hour shows its worst hour.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec
from django.db.models import Max, Min, Sum

from pipeline.models import Capacity, Failure, Latency, LeaseAdvice, Mart, RunLog, Throughput, Usage, WebhookHealth
from pipeline.selectors import DateRange

HOUR, DAY = dt.timedelta(hours=1), dt.timedelta(days=1)
# Length of the period in days -> length of a step.
SPANS: Final = {1: HOUR, 7: HOUR, 30: DAY, 90: DAY}
MAX_ROWS = 20
MAX_COMMANDS = 200
QUANTILES = ("p50", "p95", "p99")
TARGETS = ("1s", "10s", "60s")


class MartSeries(msgspec.Struct, frozen=True, kw_only=True):
    """A chart's values, one for each step, oldest first. None marks a step without a value."""

    step_seconds: int
    ends_ms: list[int]
    values: dict[str, list[float | None]]


class FailureTrend(NamedTuple):
    """The occurrences of one failure over the period."""

    fingerprint: str
    attempts: int
    dead: int
    first_at: dt.datetime
    last_at: dt.datetime
    example: str
    trend: list[int]  # attempts on each day


class StepGrid:
    """A period divided into steps, to which rows are assigned by their time."""

    def __init__(self, period: DateRange, step: dt.timedelta) -> None:
        self.start = dt.datetime.combine(period.since, dt.time(), dt.UTC)
        self.step = step
        self.count = (period.until - period.since) // step

    def sum_steps(self, rows: Iterable[dict[str, Any]], *names: str, scale: float = 1.0) -> MartSeries:
        """Return the sum of each column in each step, 0 without rows."""
        return self._aggregate(rows, names, lambda old, new: (old or 0) + new * scale, 0.0)

    def max_steps(self, rows: Iterable[dict[str, Any]], names: dict[str, str], scale: float = 1.0) -> MartSeries:
        """Return the maximum of each column in each step, None without rows.

        `names` maps columns to series names.
        """
        renamed = ({"at": row["at"]} | {series: row[column] for column, series in names.items()} for row in rows)
        return self._aggregate(renamed, tuple(names.values()), lambda old, new: max(old or 0.0, new * scale), None)

    def _aggregate(
        self,
        rows: Iterable[dict[str, Any]],
        names: tuple[str, ...],
        combine: Callable[[float | None, float], float],
        empty: float | None,
    ) -> MartSeries:
        values: dict[str, list[float | None]] = {name: [empty] * self.count for name in names}
        for row in rows:
            index = (row["at"] - self.start) // self.step
            if not 0 <= index < self.count:
                continue
            for name in names:
                if row[name] is not None:
                    values[name][index] = combine(values[name][index], row[name])
        ends = [self.start + (number + 1) * self.step for number in range(self.count)]
        return MartSeries(
            step_seconds=round(self.step.total_seconds()),
            ends_ms=[round(end.timestamp() * 1000) for end in ends],
            values=values,
        )


def find_latest_day(tid: str) -> dt.date | None:
    """Return the last day for which the tenant has history.

    Days in the future, which a wrong clock causes, are ignored.
    """
    today = dt.datetime.now(dt.UTC).date()
    for mart in (Throughput, WebhookHealth):
        last_day: dt.date | None = mart.objects.filter(tenant_id=tid, date__lte=today).aggregate(last=Max("date"))[
            "last"
        ]
        if last_day is not None:
            return last_day
    return None


def find_last_publication() -> dt.datetime | None:
    """Return the time at which the marts were last published to PostgreSQL."""
    succeeded = RunLog.objects.filter(job="publish", state=RunLog.JobState.SUCCEEDED).order_by("-started_at")
    return succeeded.values_list("ended_at", flat=True).first()


def list_commands(tid: str, period: DateRange) -> list[str]:
    """Return the tenant's commands in the period, the command with the most attempts first."""
    rows = (
        _filter_rows(Throughput, tid, period)
        .values("command")
        .annotate(total=Sum("attempts"))
        .order_by("-total", "command")
    )
    return list(rows.values_list("command", flat=True)[:MAX_COMMANDS])


def build_charts(tid: str, command: str, period: DateRange) -> dict[str, MartSeries]:
    """Return the series of each chart, by the chart's name."""
    steps, by_day = StepGrid(period, SPANS[(period.until - period.since).days]), StepGrid(period, DAY)
    throughput = list(_read_hours(Throughput, tid, period, command=command))
    latency = list(_read_hours(Latency, tid, period, command=command))
    quantiles = {kind: {f"{kind}_{name}_ms": name for name in QUANTILES} for kind in ("wait", "run")}
    return {
        "ended": steps.sum_steps(throughput, "completed", "failed", "nacked", "abandoned", "expired", "cancelled"),
        "wait_time": steps.max_steps(latency, quantiles["wait"], 0.001),
        "run_time": steps.max_steps(latency, quantiles["run"], 0.001),
        "workers": steps.max_steps(
            _read_hours(Capacity, tid, period, command=command),
            {"load": "load"} | {f"workers_{target}": f"within_{target}" for target in TARGETS},
        ),
        "worker_time": by_day.sum_steps(
            (
                {**row, "at": _midnight(row["date"])}
                for row in _filter_rows(Usage, tid, period).values("date", "compute_ms")
            ),
            "compute_ms",
            scale=0.001,
        ),
        "deliveries": steps.sum_steps(_read_hours(WebhookHealth, tid, period), "delivered", "refused", "unreachable"),
    }


def sum_totals(tid: str, command: str, period: DateRange) -> dict[str, int]:
    """Return the totals of the command's attempts and of the tenant's usage.

    Usage has the prefix `all_`.
    """
    throughput = _filter_rows(Throughput, tid, period).filter(command=command)
    names = ("attempts", "completed", "ended", "dead", "retries")
    usage_names = ("tasks", "payload_bytes")
    sums = throughput.aggregate(**{name: Sum(name) for name in names})
    sums |= _filter_rows(Usage, tid, period).aggregate(**{f"all_{name}": Sum(name) for name in usage_names})
    return {name: value or 0 for name, value in sums.items()}


def list_failures(tid: str, command: str, period: DateRange) -> tuple[list[FailureTrend], bool]:
    """Return the most frequent failures with their daily counts.

    The second value is true if there are more failures.
    """
    rows = _filter_rows(Failure, tid, period).filter(command=command)
    totals = {"attempts": Sum("attempts"), "dead": Sum("dead"), "first": Min("first_at"), "last": Max("last_at")}
    query = rows.values("fingerprint").annotate(**totals, task=Max("example")).order_by("-attempts")
    groups = list(query[: MAX_ROWS + 1])
    names = [group["fingerprint"] for group in groups[:MAX_ROWS]]
    trends: dict[str, list[int]] = defaultdict(lambda: [0] * (period.until - period.since).days)
    for name, day, count in rows.filter(fingerprint__in=names).values_list("fingerprint", "date", "attempts"):
        trends[name][(day - period.since).days] = count
    failures = [
        FailureTrend(
            fingerprint=group["fingerprint"],
            attempts=group["attempts"],
            dead=group["dead"],
            first_at=group["first"],
            last_at=group["last"],
            example=group["task"],
            trend=trends[group["fingerprint"]],
        )
        for group in groups[:MAX_ROWS]
    ]
    return failures, len(groups) > MAX_ROWS


def list_lease_advice(tid: str, period: DateRange) -> list[dict[str, Any]]:
    """Return the advice for each command: the maxima and the totals over the days."""
    maxima = ("run_p50_ms", "run_p99_ms", "run_max_ms", "lease_advice_seconds", "max_attempts_advice")
    values: dict[str, Any] = {name: Max(name) for name in maxima}
    values |= {name: Sum(name) for name in ("attempts", "expired", "duplicate_ms")}
    return list(
        _filter_rows(LeaseAdvice, tid, period).values("command").annotate(**values).order_by("-attempts")[:MAX_ROWS]
    )


def list_endpoints(tid: str, period: DateRange) -> list[dict[str, Any]]:
    """Return the delivery attempts of each endpoint by result."""
    values: dict[str, Any] = {name: Sum(name) for name in ("attempts", "delivered", "refused", "unreachable")}
    values |= {"p95": Max("latency_p95_ms")}
    return list(
        _filter_rows(WebhookHealth, tid, period).values("endpoint").annotate(**values).order_by("-attempts")[:MAX_ROWS]
    )


def _filter_rows(mart: type[Mart], tid: str, period: DateRange) -> Any:
    return mart._default_manager.filter(tenant_id=tid, date__gte=period.since, date__lt=period.until).order_by()


def _read_hours(mart: type[Mart], tid: str, period: DateRange, **filters: str) -> Iterable[dict[str, Any]]:
    return ({**row, "at": row["hour"]} for row in _filter_rows(mart, tid, period).filter(**filters).values())


def _midnight(day: dt.date) -> dt.datetime:
    return dt.datetime.combine(day, dt.time(), dt.UTC)
