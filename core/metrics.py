"""Prometheus metrics of all processes on a machine.

Every process keeps its counters in a file, and a scrape adds the files up, because it reaches only one process: the web
processes share one port, and Celery processes have no port. The files of ended processes stay, because a counter must
not fall.
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

# Containers that share CODEQ_HOME may have equal process ids: each host name gets a directory of its own.
_directory = conf().home_path / "metrics" / (re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname()) or "local")
_directory.mkdir(parents=True, exist_ok=True)
# prometheus_client reads this variable once, when it is imported.
os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(_directory)

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest  # noqa: E402
from prometheus_client.core import GaugeMetricFamily  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The time that one scrape has for the gauges that are read from Redis and PostgreSQL.
SCRAPE_SECONDS = 2.0
# Clients choose the names of commands. At most this many become label values in one process, so that the number of
# time series stays bounded; the others count as `other`.
MAX_LABELS = 500
OTHER_LABEL = "other"
FLUSH_SECONDS = 0.5

GaugeReader = Callable[[float], Iterable[Metric]]
_gauge_readers: list[GaugeReader] = []
_labels: set[str] = set()
_buffered_counters: list[BufferedCounter] = []


def label(command: str) -> str:
    """Return the label value for a command: its name, or `other` beyond MAX_LABELS names."""
    if command in _labels:
        return command
    if len(_labels) >= MAX_LABELS:
        return OTHER_LABEL
    _labels.add(command)
    return command


class BufferedCounter:
    """A counter with one value per command, for code on the event loop.

    Writing to the file costs more than counting, so counts are collected and written every FLUSH_SECONDS, and before
    this process is scraped or ends.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counts: dict[str, int] = {}
        _buffered_counters.append(self)

    def add(self, command: str) -> None:
        counts = self._counts
        if not counts:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)
        counts[command] = counts.get(command, 0) + 1

    def flush(self) -> None:
        for command, count in self._counts.items():
            self._counter.labels(label(command)).inc(count)
        self._counts.clear()


def flush() -> None:
    """Write all collected counts. Call it on the event loop."""
    for counter in _buffered_counters:
        counter.flush()


def at_scrape(read: GaugeReader) -> GaugeReader:
    """Register a function that yields gauges at every scrape.

    It is called with a deadline on the clock of time.monotonic().
    """
    _gauge_readers.append(read)
    return read


class _CounterFiles(MultiProcessCollector):
    def collect(self) -> Iterator[Metric]:
        # A process that was killed between opening and writing its file leaves an empty one.
        files = [name for name in glob(str(_directory.parent / "*" / "*.db")) if os.path.getsize(name)]
        yield from self.merge(files, accumulate=True)  # type: ignore[no-untyped-call]


class _Gauges:
    def collect(self) -> Iterator[Metric]:
        deadline = time.monotonic() + SCRAPE_SECONDS
        for read in _gauge_readers:
            yield from read(deadline)


def scrape() -> bytes:
    """Return all metrics in Prometheus' text format. Blocks, so call it in a thread."""
    registry = CollectorRegistry()
    _CounterFiles(registry, path=str(_directory))  # type: ignore[no-untyped-call]
    registry.register(_Gauges())
    return generate_latest(registry)


# Import prometheus_client's names from here: the directory must be set before its first import.
__all__ = ["BufferedCounter", "Counter", "GaugeMetricFamily", "Histogram", "at_scrape", "flush", "label", "scrape"]

http_errors = Counter("codeq_http_errors_total", "Error responses of the API.", ["status", "code"])
rate_limit_hits = Counter("codeq_rate_limit_hits_total", "Requests refused with 429.", ["scope"])
