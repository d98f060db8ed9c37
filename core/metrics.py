"""Prometheus metrics of a whole machine: every process keeps its counters in a file, a scrape adds the files up.

All web processes share one port, so a scrape reaches any of them, and Celery counts too. The files of a process that
has ended stay: a counter must not go back.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from glob import glob

from core.conf import conf

# Processes of several containers may share CODEQ_HOME, and then have the same process ids.
_directory = conf().home_path / "metrics" / (re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname()) or "local")
_directory.mkdir(parents=True, exist_ok=True)
# prometheus_client looks at the environment once, when it is imported.
os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(_directory)

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest  # noqa: E402
from prometheus_client.core import GaugeMetricFamily  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# What is read from outside at a scrape gets this long altogether.
SCRAPE_SECONDS = 2.0
# Commands are chosen by clients: a thousandth name must not make a thousand time series more.
LABELS = 500
OTHER = "other"
TALLY_SECONDS = 0.5

Gauges = Callable[[float], Iterable[Metric]]
_gauges: list[Gauges] = []
_known: set[str] = set()
_tallies: list[BufferedCounter] = []


def label(command: str) -> str:
    """The label value for a command: itself, or `other` once this process knows LABELS of them."""
    if command in _known:
        return command
    if len(_known) >= LABELS:
        return OTHER
    _known.add(command)
    return command


class BufferedCounter:
    """What an event loop counts by command. Writing to the file costs more than the rest of counting, so it is done
    once for all of a while, and before this process is scraped or ends."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counts: dict[str, int] = {}
        _tallies.append(self)

    def add(self, command: str) -> None:
        counts = self._counts
        if not counts:
            asyncio.get_running_loop().call_later(TALLY_SECONDS, self.flush)
        counts[command] = counts.get(command, 0) + 1

    def flush(self) -> None:
        for command, count in self._counts.items():
            self._counter.labels(label(command)).inc(count)
        self._counts.clear()


def flush() -> None:
    """On the event loop, as `Tally.add` is."""
    for tally in _tallies:
        tally.flush()


def at_scrape(read: Gauges) -> Gauges:
    """Have `read(until)` asked at every scrape for gauges; `until` is a moment of time.monotonic()."""
    _gauges.append(read)
    return read


class _Files(MultiProcessCollector):
    def collect(self) -> Iterator[Metric]:
        # One that a process has opened and not yet written, or never will, as it was killed between, has no beginning.
        files = [name for name in glob(str(_directory.parent / "*" / "*.db")) if os.path.getsize(name)]
        yield from self.merge(files, accumulate=True)  # type: ignore[no-untyped-call]


class _AtScrape:
    def collect(self) -> Iterator[Metric]:
        until = time.monotonic() + SCRAPE_SECONDS
        for read in _gauges:
            yield from read(until)


def scrape() -> bytes:
    """Everything, in Prometheus' text format. Reads files and asks Redis: not on an event loop."""
    registry = CollectorRegistry()
    _Files(registry, path=str(_directory))  # type: ignore[no-untyped-call]
    registry.register(_AtScrape())
    return generate_latest(registry)


# Other modules take these from here, or they would be imported before the environment says where to count.
__all__ = ["BufferedCounter", "Counter", "GaugeMetricFamily", "Histogram", "at_scrape", "flush", "label", "scrape"]

refusals = Counter("codeq_http_errors_total", "Answers of the API that were problems.", ["status", "code"])
rate_limit_hits = Counter("codeq_rate_limit_hits_total", "Requests refused with 429.", ["scope"])
