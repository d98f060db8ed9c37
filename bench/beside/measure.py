"""One measurement of one system, on a new store.

It measures the delay of tasks in idle workers, then enqueues tasks one by one and in batches, and works them off.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from bench.beside.environments import DRIVERS
from bench.beside.processes import MeasurementError, Producer, Workers, cpu_seconds, running_workers
from bench.beside.stores import Store
from bench.beside.systems import ENQUEUE, LATENCY, WORK, System
from codeq_site.devserver.supervisor import last_line

# A low load: the workers are idle when a task arrives.
LATENCY_INTERVAL_SECONDS = 0.05
POLL_SECONDS = 0.05
START_SECONDS = 60.0
# Tasks that are worked off before the rate is measured, so that the start of the workers does not count.
WARM_UP_TASKS = 20

Figures = dict[str, float]


class Sizes(NamedTuple):
    """How long and how often a run measures."""

    rounds: int
    seconds: float
    latency_tasks: int


FULL = Sizes(rounds=3, seconds=6.0, latency_tasks=100)
QUICK = Sizes(rounds=1, seconds=1.5, latency_tasks=30)


def measure_once(
    system: System, installed: Path, directory: Path, sizes: Sizes, report: Callable[[str], None]
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Return the figures of each operation, and the versions. Raises MeasurementError."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            report("starting")
            store = stack.enter_context(system.store(directory))
            measurement = _Measurement(system, installed, directory, store, sizes)
            stack.callback(measurement.close)
            figures = {}
            for operation in system.operations:
                report(operation)
                figures[operation] = measurement.run(operation)
            return figures, store.versions() | measurement.producer.versions
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Measurement:
    """A producer on a store. It starts the workers when an operation needs them."""

    def __init__(self, system: System, installed: Path, directory: Path, store: Store, sizes: Sizes) -> None:
        self.system, self.store, self.sizes = system, store, sizes
        self.delays = directory / "delays"
        self.log = directory / "worker.log"
        self.environ = {
            **os.environ,
            **store.environ,
            "BENCH_STORE": store.url,
            "BENCH_DELAYS": str(self.delays),
            "PYTHONPATH": str(DRIVERS),
        }
        self.worker_argv = system.argv(installed, "work")
        self.producer = Producer(system.argv(installed, "produce"), self.environ, directory / "producer.log")

    def close(self) -> None:
        self.producer.stop()

    def run(self, operation: str) -> Figures:
        if operation == LATENCY:
            return self._measure_latency()
        if operation == WORK:
            if ENQUEUE not in self.system.operations:
                self._ask(ENQUEUE)
            return self._measure_work()
        return self._measure_enqueue(operation)

    def _ask(self, operation: str) -> dict[str, float]:
        seconds = self.sizes.seconds
        return self.producer.ask({"operation": operation, "seconds": seconds}, seconds + 60)

    def _measure_enqueue(self, operation: str) -> Figures:
        pids = [*self.store.pids(), self.producer.process.pid]
        before = cpu_seconds(pids)
        answer = self._ask(operation)
        count = answer["count"]
        return {
            "per_second": count / answer["seconds"],
            "cpu_us": (cpu_seconds(pids) - before) / count * 1e6,
        }

    def _measure_work(self) -> Figures:
        """Measure the rate at which the workers end the waiting tasks, after the first few.

        The rate is taken up to the last count above zero, because at zero the workers may have been idle for a moment.
        The processor time includes the tasks after that count.
        """
        waiting = self._count()
        if waiting <= WARM_UP_TASKS:
            raise MeasurementError(f"only {waiting} tasks are waiting")
        with self._workers() as workers:
            pids = [*self.store.pids(), *workers.pids()]
            deadline = time.monotonic() + START_SECONDS
            while (count_at_start := self._count()) > waiting - WARM_UP_TASKS:
                workers.check()
                if time.monotonic() > deadline:
                    raise MeasurementError("no task was worked off", last_line(self.log))
                time.sleep(POLL_SECONDS)
            started, before = time.perf_counter(), cpu_seconds(pids)
            count_at_end, ended = count_at_start, started
            while count_at_end and ended - started < self.sizes.seconds:
                time.sleep(POLL_SECONDS)
                workers.check()
                count, now = self._count(), time.perf_counter()
                if count or ended == started:
                    count_at_end, ended = count, now
                if not count:
                    break
            used = cpu_seconds(pids) - before
        if count_at_start == count_at_end:
            raise MeasurementError("the workers stopped", last_line(self.log))
        return {
            "per_second": (count_at_start - count_at_end) / (ended - started),
            "cpu_us": used / (count_at_start - count) * 1e6,
        }

    def _measure_latency(self) -> Figures:
        """Measure the time from enqueuing a task to the start of its handler, in idle workers."""
        with self._workers() as workers:
            self._send(workers, 1, START_SECONDS)
            self._send(workers, 5, 10)
            delays = self._send(workers, self.sizes.latency_tasks, 30)
        percentiles = quantiles(delays, n=100, method="inclusive")
        return {"p50_ms": percentiles[49] * 1e3, "p99_ms": percentiles[98] * 1e3}

    def _send(self, workers: Workers, count: int, wait_seconds: float) -> list[float]:
        """Enqueue tasks at a low rate and return their delays."""
        self.delays.write_text("")
        request = {"operation": "spaced", "count": count, "interval": LATENCY_INTERVAL_SECONDS}
        self.producer.ask(request, count * LATENCY_INTERVAL_SECONDS + 60)
        deadline = time.monotonic() + wait_seconds
        while len(lines := self.delays.read_text().splitlines()) < count:
            workers.check()
            if time.monotonic() > deadline:
                raise MeasurementError(f"{len(lines)} of {count} tasks were started", last_line(self.log))
            time.sleep(POLL_SECONDS)
        return [float(line) for line in lines]

    def _count(self) -> int:
        return self.store.count(self.system.waiting)

    def _workers(self) -> AbstractContextManager[Workers]:
        return running_workers(self.worker_argv, self.system.workers, self.environ, self.log)
