"""What the console's charts show: the marts of one tenant over a period, step by step.

Counts are added up. A quantile is of its hour, and quantiles of several hours are no quantile of them all: a longer
step shows its worst hour.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec
from django.db.models import Max, Min, Sum

from pipeline.models import Capacity, Failure, Latency, LeaseAdvice, Mart, RunLog, Throughput, Usage, WebhookHealth
from pipeline.selectors import Days

HOUR, DAY = dt.timedelta(hours=1), dt.timedelta(days=1)
# Days -> how long a step is.
SPANS: Final = {1: HOUR, 7: HOUR, 30: DAY, 90: DAY}
GROUPS = 20
COMMANDS = 200
QUANTILES = ("p50", "p95", "p99")
TARGETS = ("1s", "10s", "60s")


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Values step by step, oldest first; a step without a row has None where nothing is not zero."""

    step_seconds: int
    ends_ms: list[int]
    values: dict[str, list[float | None]]


class Group(NamedTuple):
    """One failure over the period."""

    fingerprint: str
    attempts: int
    dead: int
    first_at: dt.datetime
    last_at: dt.datetime
    example: str
    trend: list[int]  # a value a day


class Steps:
    """A period in steps, and rows put where they belong."""

    def __init__(self, days: Days, step: dt.timedelta) -> None:
        self.start = dt.datetime.combine(days.since, dt.time(), dt.UTC)
        self.step = step
        self.count = (days.until - days.since) // step

    def add(self, rows: Iterable[dict[str, Any]], *names: str, scale: float = 1.0) -> Course:
        """The sum of each step."""
        return self._put(rows, names, lambda old, new: (old or 0) + new * scale, 0.0)

    def worst(self, rows: Iterable[dict[str, Any]], names: dict[str, str], scale: float = 1.0) -> Course:
        """The most in each step, by the name it is shown under."""
        renamed = ({"at": row["at"]} | {shown: row[name] for name, shown in names.items()} for row in rows)
        return self._put(renamed, tuple(names.values()), lambda old, new: max(old or 0.0, new * scale), None)

    def _put(
        self,
        rows: Iterable[dict[str, Any]],
        names: tuple[str, ...],
        join: Callable[[float | None, float], float],
        nothing: float | None,
    ) -> Course:
        values: dict[str, list[float | None]] = {name: [nothing] * self.count for name in names}
        for row in rows:
            at = (row["at"] - self.start) // self.step
            if not 0 <= at < self.count:
                continue
            for name in names:
                if row[name] is not None:
                    values[name][at] = join(values[name][at], row[name])
        ends = [self.start + (number + 1) * self.step for number in range(self.count)]
        return Course(
            step_seconds=round(self.step.total_seconds()),
            ends_ms=[round(end.timestamp() * 1000) for end in ends],
            values=values,
        )


def latest(tid: str) -> dt.date | None:
    """The last day that the tenant has history of. A row from the future, of a clock gone wrong, is no such day."""
    today = dt.datetime.now(dt.UTC).date()
    for mart in (Throughput, WebhookHealth):
        found: dt.date | None = mart.objects.filter(tenant_id=tid, date__lte=today).aggregate(last=Max("date"))["last"]
        if found is not None:
            return found
    return None


def last_run() -> dt.datetime | None:
    """When the marts were last brought up to date."""
    done = RunLog.objects.filter(job="publish", state=RunLog.State.SUCCEEDED).order_by("-started_at")
    return done.values_list("ended_at", flat=True).first()


def commands(tid: str, days: Days) -> list[str]:
    """The tenant's commands in this time, the one with most attempts first."""
    rows = _of(Throughput, tid, days).values("command").annotate(total=Sum("attempts")).order_by("-total", "command")
    return list(rows.values_list("command", flat=True)[:COMMANDS])


def charts(tid: str, command: str, days: Days) -> dict[str, Course]:
    """By the chart's name."""
    steps, by_day = Steps(days, SPANS[(days.until - days.since).days]), Steps(days, DAY)
    ended = list(_hourly(Throughput, tid, days, command=command))
    spread = list(_hourly(Latency, tid, days, command=command))
    quantiles = {what: {f"{what}_{name}_ms": name for name in QUANTILES} for what in ("wait", "run")}
    return {
        "ended": steps.add(ended, "completed", "failed", "nacked", "abandoned", "expired", "cancelled"),
        "waited": steps.worst(spread, quantiles["wait"], 0.001),
        "ran": steps.worst(spread, quantiles["run"], 0.001),
        "workers": steps.worst(
            _hourly(Capacity, tid, days, command=command),
            {"load": "load"} | {f"workers_{target}": f"within_{target}" for target in TARGETS},
        ),
        "worked": by_day.add(
            ({**row, "at": _midnight(row["date"])} for row in _of(Usage, tid, days).values("date", "compute_ms")),
            "compute_ms",
            scale=0.001,
        ),
        "answered": steps.add(_hourly(WebhookHealth, tid, days), "delivered", "refused", "unreachable"),
    }


def totals(tid: str, command: str, days: Days) -> dict[str, int]:
    """Of the command, what ended how; of the tenant, what it used."""
    ended = _of(Throughput, tid, days).filter(command=command)
    names = ("attempts", "completed", "ended", "dead", "retries")
    used = ("tasks", "payload_bytes")
    found = ended.aggregate(**{name: Sum(name) for name in names})
    found |= _of(Usage, tid, days).aggregate(**{f"all_{name}": Sum(name) for name in used})
    return {name: value or 0 for name, value in found.items()}


def failures(tid: str, command: str, days: Days) -> tuple[list[Group], bool]:
    """The most frequent failures of the period with their course, and whether there are more."""
    rows = _of(Failure, tid, days).filter(command=command)
    said = {"attempts": Sum("attempts"), "dead": Sum("dead"), "first": Min("first_at"), "last": Max("last_at")}
    found = list(rows.values("fingerprint").annotate(**said, task=Max("example")).order_by("-attempts")[: GROUPS + 1])
    names = [each["fingerprint"] for each in found[:GROUPS]]
    trends: dict[str, list[int]] = defaultdict(lambda: [0] * (days.until - days.since).days)
    for name, day, count in rows.filter(fingerprint__in=names).values_list("fingerprint", "date", "attempts"):
        trends[name][(day - days.since).days] = count
    groups = [
        Group(
            fingerprint=each["fingerprint"],
            attempts=each["attempts"],
            dead=each["dead"],
            first_at=each["first"],
            last_at=each["last"],
            example=each["task"],
            trend=trends[each["fingerprint"]],
        )
        for each in found[:GROUPS]
    ]
    return groups, len(found) > GROUPS


def leases(tid: str, days: Days) -> list[dict[str, Any]]:
    """Each command's advice: what its worst day of the period asks for."""
    most = ("run_p50_ms", "run_p99_ms", "run_max_ms", "lease_advice_seconds", "max_attempts_advice")
    said: dict[str, Any] = {name: Max(name) for name in most}
    said |= {name: Sum(name) for name in ("attempts", "expired", "duplicate_ms")}
    return list(_of(LeaseAdvice, tid, days).values("command").annotate(**said).order_by("-attempts")[:GROUPS])


def endpoints(tid: str, days: Days) -> list[dict[str, Any]]:
    """How each endpoint answered."""
    said: dict[str, Any] = {name: Sum(name) for name in ("attempts", "delivered", "refused", "unreachable")}
    said |= {"p95": Max("latency_p95_ms")}
    return list(_of(WebhookHealth, tid, days).values("endpoint").annotate(**said).order_by("-attempts")[:GROUPS])


def _of(mart: type[Mart], tid: str, days: Days) -> Any:
    return mart._default_manager.filter(tenant_id=tid, date__gte=days.since, date__lt=days.until).order_by()


def _hourly(mart: type[Mart], tid: str, days: Days, **more: str) -> Iterable[dict[str, Any]]:
    return ({**row, "at": row["hour"]} for row in _of(mart, tid, days).filter(**more).values())


def _midnight(day: dt.date) -> dt.datetime:
    return dt.datetime.combine(day, dt.time(), dt.UTC)
