"""What if: real history played again through other workers, priorities, leases or backoff.

Each tenant is a queue of its own. A free worker takes, as the engine does, the highest priority first and the oldest
inside it. What a run costs is what it cost then; a lease that is shorter than the run returns the task meanwhile and
the worker finishes for nothing; one whose worker was lost is over when the new lease is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

BACKOFFS = ("fixed", "linear", "exponential", "exp_full_jitter", "exp_equal_jitter")
SUMMARY = (
    "tenant string, command string, tasks long, attempts long, dead long, duplicate_ms long, wait_mean_ms double, "
    "wait_p50_ms long, wait_p95_ms long, wait_p99_ms long, wait_max_ms long, workers int, busy double"
)


@dataclass(frozen=True)
class Backoff:
    """When a task is tried again. Jitter is replaced by its mean: a simulation has no use for luck."""

    policy: str
    base_seconds: float = 5.0
    cap_seconds: float = 900.0

    def delay_ms(self, failures: int) -> int:
        factor = {"fixed": 1.0, "linear": float(failures)}.get(self.policy, 2.0 ** min(failures - 1, 60))
        seconds = min(self.base_seconds * factor, self.cap_seconds)
        share = {"exp_full_jitter": 0.5, "exp_equal_jitter": 0.75}.get(self.policy, 1.0)
        return round(1000 * seconds * share)

    @classmethod
    def parse(cls, text: str) -> Backoff:
        """`policy[:base seconds[:cap seconds]]`"""
        policy, *numbers = text.split(":")
        if policy not in BACKOFFS or len(numbers) > 2:
            raise ValueError(f"{text}: say policy[:base[:cap]] with one of {', '.join(BACKOFFS)}")
        return cls(policy, *(float(number) for number in numbers))


@dataclass(frozen=True)
class Scenario:
    """What to change. None = as it was; `workers` None = as many as were ever busy at once."""

    workers: int | None = None
    concurrency: int = 1
    lease_seconds: int | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None
    priorities: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Try:
    """One attempt as it happened: how long it held its worker, and how long after it the task was visible again."""

    run_ms: int
    failed: bool = False
    lost: bool = False  # the lease ran out
    gap_ms: int = 0


@dataclass(frozen=True)
class Job:
    """One task of the history."""

    command: str
    visible_ms: int
    tries: Sequence[Try]
    priority: int = 0


@dataclass
class Played:
    """What became of a command's tasks."""

    waits: list[int] = field(default_factory=list)
    tasks: int = 0
    dead: int = 0
    duplicate_ms: int = 0


def play(jobs: Sequence[Job], scenario: Scenario, servers: int) -> tuple[dict[str, Played], float]:
    """Play the history with so many servers. Returns each command's outcome, and the share of time they were busy."""
    found: dict[str, Played] = {}
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].visible_ms)
    arrivals = iter(order)
    upcoming = next(arrivals, None)
    again: list[tuple[int, int, int]] = []  # (visible, task, number)
    ready: list[tuple[int, int, int, int]] = []  # (-priority, visible, task, number)
    first = jobs[order[0]].visible_ms if order else 0
    free = [first] * servers
    busy = 0
    while True:
        now = free[0]
        if not ready:
            # Nobody waits: the server stands idle until the next task is due.
            due = [jobs[upcoming].visible_ms] if upcoming is not None else []
            due += [again[0][0]] if again else []
            if not due:
                break
            now = max(now, min(due))
        while upcoming is not None and jobs[upcoming].visible_ms <= now:
            heapq.heappush(ready, (-_priority(jobs[upcoming], scenario), jobs[upcoming].visible_ms, upcoming, 0))
            upcoming = next(arrivals, None)
        while again and again[0][0] <= now:
            visible, task, number = heapq.heappop(again)
            heapq.heappush(ready, (-_priority(jobs[task], scenario), visible, task, number))
        _, visible, task, number = heapq.heappop(ready)
        job = jobs[task]
        outcome = found.setdefault(job.command, Played())
        outcome.tasks += number == 0
        outcome.waits.append(now - visible)
        held_ms, ended_ms, failed, gap_ms = _attempt(job.tries[min(number, len(job.tries) - 1)], number, scenario)
        heapq.heapreplace(free, now + held_ms)
        busy += held_ms
        outcome.duplicate_ms += held_ms if failed and held_ms > ended_ms else 0
        if failed:
            more = number + 1 < (scenario.max_attempts or len(job.tries))
            if more and (number + 1 < len(job.tries) or scenario.max_attempts is not None):
                heapq.heappush(again, (now + ended_ms + gap_ms, task, number + 1))
            else:
                outcome.dead += 1
    span = max(free) - first if order else 0
    return found, busy / (span * servers) if span else 0.0


def _priority(job: Job, scenario: Scenario) -> int:
    return scenario.priorities.get(job.command, job.priority)


def _attempt(one: Try, number: int, scenario: Scenario) -> tuple[int, int, bool, int]:
    """How long the attempt holds its worker, after what time the task is given back, whether it failed, and how long
    it is hidden then."""
    held = ended = one.run_ms
    failed = one.failed or one.lost
    if scenario.lease_seconds is not None:
        lease = scenario.lease_seconds * 1000
        if one.lost:
            held = ended = lease
        elif one.run_ms > lease:
            ended, failed = lease, True
    gap = scenario.backoff.delay_ms(number + 1) if scenario.backoff else one.gap_ms
    return held, ended, failed, gap


def most_at_once(starts: Any, ends: Any) -> int:
    """The most attempts that were running at one moment."""
    moments = np.concatenate([np.asarray(starts), np.asarray(ends)])
    steps = np.concatenate([np.ones(len(starts), dtype=int), -np.ones(len(ends), dtype=int)])
    # Who ends at the moment another begins has made room for it.
    order = np.lexsort((steps, moments))
    return int(np.cumsum(steps[order]).max(initial=0))


def simulated(attempts: DataFrame, scenario: Scenario) -> DataFrame:
    """Each tenant's history under this scenario: a row per command (`SUMMARY`)."""
    columns = ("tenant", "task_id", "number", "command", "priority", "outcome", "status")
    times = [F.unix_millis(f"{name}_at").alias(f"{name}_ms") for name in ("visible", "claimed", "ended")]
    history = attempts.where("claimed_at IS NOT NULL").select(*columns, *times)

    def of_tenant(rows: Any) -> Any:
        return _summary(rows, scenario)

    return history.groupBy("tenant").applyInPandas(of_tenant, SUMMARY)


def measured(attempts: DataFrame) -> DataFrame:
    """The same columns as they were."""
    from pipeline.spark.transforms.common import at, count_where, sorted_values
    from pipeline.spark.transforms.throughput import is_dead

    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        .groupBy("tenant", "command")
        .agg(
            F.count_distinct("task_id").alias("tasks"),
            F.count("*").alias("attempts"),
            count_where(is_dead()).alias("dead"),
            F.sum(F.when(F.col("outcome") == "EXPIRED", F.col("run_ms")).otherwise(0)).alias("duplicate_ms"),
            F.avg("wait_ms").alias("wait_mean_ms"),
            sorted_values(F.col("wait_ms")).alias("waits"),
        )
    )
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    kept = [name for name in grouped.columns if name != "waits"]
    return grouped.select(*kept, *(at(F.col("waits"), share).alias(f"wait_{n}_ms") for n, share in shares.items()))


def _summary(rows: Any, scenario: Scenario) -> Any:
    import pandas as pd

    tenant = rows["tenant"].iloc[0]
    servers = (
        scenario.workers * scenario.concurrency
        if scenario.workers
        else most_at_once(rows["claimed_ms"].to_numpy(), rows["ended_ms"].to_numpy())
    )
    found, busy = play(list(_jobs(rows)), scenario, max(servers, 1))
    result = []
    for command, played in sorted(found.items()):
        waits = np.sort(np.asarray(played.waits))
        ranks = [max(int(np.ceil(len(waits) * share)), 1) - 1 for share in (0.5, 0.95, 0.99, 1.0)]
        quantiles = (int(waits[rank]) for rank in ranks)
        counts = (played.tasks, len(waits), played.dead, played.duplicate_ms)
        result.append((tenant, command, *counts, float(waits.mean()), *quantiles, servers, round(busy, 4)))
    return pd.DataFrame(result, columns=[part.split()[0] for part in SUMMARY.split(", ")])


def _jobs(rows: Any) -> Iterator[Job]:
    """The tasks of one tenant's attempts. Of a task whose beginning lies before the period, what is in it."""
    ordered = rows.sort_values(["task_id", "number"])
    names = ("task_id", "command", "priority", "outcome", "visible_ms", "claimed_ms", "ended_ms")
    tries: list[Try] = []
    last: Any = None
    first: Any = None
    for row in zip(*(ordered[name].tolist() for name in names), strict=True):
        task, _, _, outcome, visible, claimed, ended = row
        if last is not None and last[0] == task:
            previous = tries[-1]
            tries[-1] = Try(previous.run_ms, previous.failed, previous.lost, max(visible - last[6], 0))
        elif first is not None:
            yield Job(first[1], first[4], tuple(tries), first[2])
            tries = []
        if not tries:
            first = row
        failed = outcome in ("NACKED", "ABANDONED", "EXPIRED")
        tries.append(Try(max(ended - claimed, 0), failed, outcome == "EXPIRED"))
        last = row
    if first is not None:
        yield Job(first[1], first[4], tuple(tries), first[2])
