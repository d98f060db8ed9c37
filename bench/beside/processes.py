"""The processes of a measurement: a producer, the workers, and their processor time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from codeq_site.devserver.supervisor import last_line, signal_group, spawn

STOP_SECONDS = 5.0


class MeasurementError(Exception):
    """A system cannot be measured. The message is short; `detail` is the last line of a log."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class Producer:
    """A driver that reads requests from a pipe.

    When this process ends, the pipe closes and the driver ends too.
    """

    def __init__(self, argv: list[str], environ: Mapping[str, str], log: Path, start_seconds: float = 60.0) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=dict(environ),
                start_new_session=True,
            )  # fmt: skip
        self._received = b""
        try:
            self.versions: dict[str, str] = self._read(start_seconds)["versions"]
        except BaseException:
            self.stop()
            raise

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return its answer. Raises MeasurementError if it is late."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise MeasurementError("the producer ended", last_line(self.log)) from error
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise MeasurementError(f"the producer did not answer within {seconds:g} s", last_line(self.log))
            data = os.read(descriptor, 65536)
            if not data:
                raise MeasurementError("the producer ended", last_line(self.log))
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        end([self.process])


class Workers(NamedTuple):
    """The worker processes of a system."""

    processes: list[subprocess.Popen[bytes]]
    log: Path

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def check(self) -> None:
        """Raise MeasurementError if a worker has ended."""
        if any(process.poll() is not None for process in self.processes):
            raise MeasurementError("a worker ended", last_line(self.log))


@contextmanager
def running_workers(argv: list[str], count: int, environ: Mapping[str, str], log: Path) -> Iterator[Workers]:
    """Run `count` worker processes. They end with the block, or with this process."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(spawn(argv, log=log, env=environ, cwd=log.parent))
        yield Workers(started, log)
    finally:
        end(started)


def end(processes: Iterable[subprocess.Popen[bytes]], seconds: float = STOP_SECONDS) -> None:
    """Stop these processes, and kill those that do not stop in time. Their children end too."""
    processes = list(processes)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        signal_group(process, signal.SIGKILL)
        process.wait()


def end_leftovers(directory: Path) -> None:
    """Kill the workers that a killed comparison left behind, found by their environment.

    A worker ends with its comparison, but some wait for ever if their store ends at the same time.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.environ().get("BENCH_DELAYS", "")).parent == directory:
                process.kill()


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of these processes and their descendants.

    Descendants that have ended are included.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    # A process that has ended is counted in its parent's times of children.
                    total += times.user + times.system + times.children_user + times.children_system
    return total
