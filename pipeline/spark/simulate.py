"""Simulate real history with other workers, priorities, leases or backoff.

Each tenant has its own workers, which take the tasks of all its queues. As in the engine, a free worker takes the task
with the highest priority and, among those, the oldest. A simulated attempt takes as long as the recorded one. If the
simulated lease is shorter than the run, the task becomes visible again when the lease expires, and the worker's run is
wasted. An attempt whose worker was lost ends when the simulated lease expires.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

BACKOFFS = ("fixed", "linear", "exponential", "exp_full_jitter", "exp_equal_jitter")
SUMMARY_SCHEMA = (
    "tenant string, command string, tasks long, attempts long, dead long, duplicate_ms long, wait_mean_ms double, "
    "wait_p50_ms long, wait_p95_ms long, wait_p99_ms long, wait_max_ms long, workers int, busy double"
)


@dataclass(frozen=True)
class Backoff:
    """The delay before a retry.

    Jitter is replaced by its mean, so that the simulation is deterministic.
    """

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
        """Parse `policy[:base seconds[:cap seconds]]`."""
        policy, *numbers = text.split(":")
        if policy not in BACKOFFS or len(numbers) > 2:
            raise ValueError(f"{text}: expected policy[:base[:cap]], where policy is one of {', '.join(BACKOFFS)}")
        return cls(policy, *(float(number) for number in numbers))


@dataclass(frozen=True)
class Scenario:
    """The parameters to change. None keeps the recorded value.

    If `workers` is None, the simulation uses the largest number of attempts that ran at the same time.
    """

    workers: int | None = None
    concurrency: int = 1
    lease_seconds: int | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None
    priorities: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedAttempt:
    """An attempt of the history: how long it ran, and how it ended."""

    run_ms: int  # time that it held its worker
    failed: bool = False
    lost: bool = False  # the lease expired
    gap_ms: int = 0  # delay until the task was visible again


@dataclass(frozen=True)
class SimulatedTask:
    """A task of the history, with its recorded attempts."""

    command: str
    visible_ms: int
    attempts: Sequence[RecordedAttempt]
    priority: int = 0


@dataclass
class CommandOutcome:
    """The simulated results of a command's tasks."""

    waits: list[int] = field(default_factory=list)
    tasks: int = 0
    dead: int = 0
    duplicate_ms: int = 0


def simulate_tasks(
    tasks: Sequence[SimulatedTask], scenario: Scenario, servers: int
) -> tuple[dict[str, CommandOutcome], float]:
    """Simulate the history with this number of servers.

    A server runs one task at a time: a worker with a concurrency of 4 is four servers. Return the outcome of each
    command, and the share of time that the servers were busy.
    """
    outcomes: dict[str, CommandOutcome] = {}
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].visible_ms)
    arrivals = iter(order)
    upcoming = next(arrivals, None)
    retries: list[tuple[int, int, int]] = []  # (visible, index, number)
    ready: list[tuple[int, int, int, int]] = []  # (-priority, visible, index, number)
    first = tasks[order[0]].visible_ms if order else 0
    free = [first] * servers
    busy = 0
    while True:
        now = free[0]
        if not ready:
            # No task is waiting: the server is idle until the next task is due.
            due = [tasks[upcoming].visible_ms] if upcoming is not None else []
            due += [retries[0][0]] if retries else []
            if not due:
                break
            now = max(now, min(due))
        while upcoming is not None and tasks[upcoming].visible_ms <= now:
            heapq.heappush(ready, (-_get_priority(tasks[upcoming], scenario), tasks[upcoming].visible_ms, upcoming, 0))
            upcoming = next(arrivals, None)
        while retries and retries[0][0] <= now:
            visible, index, number = heapq.heappop(retries)
            heapq.heappush(ready, (-_get_priority(tasks[index], scenario), visible, index, number))
        _, visible, index, number = heapq.heappop(ready)
        task = tasks[index]
        outcome = outcomes.setdefault(task.command, CommandOutcome())
        outcome.tasks += number == 0
        outcome.waits.append(now - visible)
        attempt = _simulate_attempt(task.attempts[min(number, len(task.attempts) - 1)], number, scenario)
        heapq.heapreplace(free, now + attempt.run_ms)
        busy += attempt.run_ms
        outcome.duplicate_ms += attempt.run_ms if attempt.failed and attempt.run_ms > attempt.lease_held_ms else 0
        if attempt.failed:
            has_attempts_left = number + 1 < (scenario.max_attempts or len(task.attempts))
            if has_attempts_left and (number + 1 < len(task.attempts) or scenario.max_attempts is not None):
                heapq.heappush(retries, (now + attempt.lease_held_ms + attempt.gap_ms, index, number + 1))
            else:
                outcome.dead += 1
    span = max(free) - first if order else 0
    return outcomes, busy / (span * servers) if span else 0.0


def _get_priority(task: SimulatedTask, scenario: Scenario) -> int:
    return scenario.priorities.get(task.command, task.priority)


class SimulatedAttempt(NamedTuple):
    """The timing and result of an attempt in a scenario."""

    run_ms: int  # time that its server is busy
    lease_held_ms: int  # time until it ends or its lease expires
    failed: bool
    gap_ms: int  # delay after that until the task is visible again


def _simulate_attempt(attempt: RecordedAttempt, number: int, scenario: Scenario) -> SimulatedAttempt:
    run_ms = lease_held_ms = attempt.run_ms
    failed = attempt.failed or attempt.lost
    if scenario.lease_seconds is not None:
        lease_ms = scenario.lease_seconds * 1000
        if attempt.lost:
            run_ms = lease_held_ms = lease_ms
        elif attempt.run_ms > lease_ms:
            lease_held_ms, failed = lease_ms, True
    gap_ms = scenario.backoff.delay_ms(number + 1) if scenario.backoff else attempt.gap_ms
    return SimulatedAttempt(run_ms, lease_held_ms, failed, gap_ms)


def peak_concurrency(starts: Any, ends: Any) -> int:
    """Return the largest number of attempts that ran at the same time."""
    times = np.concatenate([np.asarray(starts), np.asarray(ends)])
    steps = np.concatenate([np.ones(len(starts), dtype=int), -np.ones(len(ends), dtype=int)])
    # At equal times, count an end before a start.
    order = np.lexsort((steps, times))
    return int(np.cumsum(steps[order]).max(initial=0))


def simulate_tenants(attempts: DataFrame, scenario: Scenario) -> DataFrame:
    """Simulate each tenant's history with this scenario.

    The result has a row per command (`SUMMARY_SCHEMA`).
    """
    columns = ("tenant", "task_id", "number", "command", "priority", "outcome", "status")
    times = [F.unix_millis(f"{name}_at").alias(f"{name}_ms") for name in ("visible", "claimed", "ended")]
    history = attempts.where("claimed_at IS NOT NULL").select(*columns, *times)

    def simulate_tenant(rows: Any) -> Any:
        return _simulate_rows(rows, scenario)

    return history.groupBy("tenant").applyInPandas(simulate_tenant, SUMMARY_SCHEMA)


def measure_tenants(attempts: DataFrame) -> DataFrame:
    """Return the summary of the recorded history, with the columns of `simulate_tenants`."""
    from pipeline.spark.transforms.common import collect_sorted, count_where, quantile
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
            collect_sorted(F.col("wait_ms")).alias("waits"),
        )
    )
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    kept = [name for name in grouped.columns if name != "waits"]
    return grouped.select(
        *kept, *(quantile(F.col("waits"), share).alias(f"wait_{n}_ms") for n, share in shares.items())
    )


def _simulate_rows(rows: Any, scenario: Scenario) -> Any:
    import pandas as pd

    tenant = rows["tenant"].iloc[0]
    servers = (
        scenario.workers * scenario.concurrency
        if scenario.workers
        else peak_concurrency(rows["claimed_ms"].to_numpy(), rows["ended_ms"].to_numpy())
    )
    outcomes, busy = simulate_tasks(list(_build_tasks(rows)), scenario, max(servers, 1))
    result = []
    for command, outcome in sorted(outcomes.items()):
        waits = np.sort(np.asarray(outcome.waits))
        ranks = [max(int(np.ceil(len(waits) * share)), 1) - 1 for share in (0.5, 0.95, 0.99, 1.0)]
        quantiles = (int(waits[rank]) for rank in ranks)
        counts = (outcome.tasks, len(waits), outcome.dead, outcome.duplicate_ms)
        result.append((tenant, command, *counts, float(waits.mean()), *quantiles, servers, round(busy, 4)))
    return pd.DataFrame(result, columns=[column.split()[0] for column in SUMMARY_SCHEMA.split(", ")])


def _build_tasks(rows: Any) -> Iterator[SimulatedTask]:
    """Yield the tasks of one tenant's attempts.

    A task that began before the period has only the later attempts.
    """
    ordered = rows.sort_values(["task_id", "number"])
    names = ("task_id", "command", "priority", "outcome", "visible_ms", "claimed_ms", "ended_ms")
    attempts: list[RecordedAttempt] = []
    last: Any = None
    first: Any = None
    for row in zip(*(ordered[name].tolist() for name in names), strict=True):
        task, _, _, outcome, visible, claimed, ended = row
        if last is not None and last[0] == task:
            previous = attempts[-1]
            attempts[-1] = RecordedAttempt(previous.run_ms, previous.failed, previous.lost, max(visible - last[6], 0))
        elif first is not None:
            yield SimulatedTask(first[1], first[4], tuple(attempts), first[2])
            attempts = []
        if not attempts:
            first = row
        failed = outcome in ("NACKED", "ABANDONED", "EXPIRED")
        attempts.append(RecordedAttempt(max(ended - claimed, 0), failed, outcome == "EXPIRED"))
        last = row
    if first is not None:
        yield SimulatedTask(first[1], first[4], tuple(attempts), first[2])
