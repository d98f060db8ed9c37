"""What Valkey and PostgreSQL have in common: a process of ours on a data directory of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from codeq_site.devserver.supervisor import Account, StartError, signal_group, spawn

NOT_INSTALLED = "The embedded {what} is not installed: run pip install 'codeq[embedded]', or set {variable}."


class Server:
    """One server process on one data directory: started, awaited, stopped, killed and started again."""

    name: str
    # Its process's name.
    program: str
    stop_signal: int = signal.SIGTERM
    # What precedes a reason in its log, the worst first.
    complaint_marks: tuple[str, ...]

    def __init__(self, data: Path, log: Path) -> None:
        self.data = data
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def prepare(self) -> None:
        """Write what the program reads."""
        raise NotImplementedError

    def argv(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    @property
    def url(self) -> str:
        raise NotImplementedError

    def account(self) -> Account | None:
        return None

    def environment(self) -> Mapping[str, str] | None:
        return None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} is not running"
        return self.process.pid

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process, without waiting for it to be ready."""
        self.prepare()
        self._end_leftover()
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0
        self.process = spawn(
            self.argv(),
            log=self.log,
            env=self.environment(),
            cwd=self.data,
            account=self.account(),
            death_signal=self.stop_signal,
        )
        return self.process

    def start(self, seconds: float = 60.0) -> None:
        """Start and wait until it answers."""
        process = self.launch()
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if process.poll() is not None:
                raise StartError(self.explain())
            if time.monotonic() > deadline:
                self.kill()
                raise StartError(f"{self.name} was not ready within {seconds:g} s; its log is {self.log}.")
            time.sleep(0.01)

    def stop(self, seconds: float = 10.0) -> None:
        """End it in order; what it acknowledged is on disk."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """End it as a power cut would (SIGKILL), children included."""
        if self.process is not None and self.process.poll() is None:
            signal_group(self.process, signal.SIGKILL)
            self.process.wait()

    def explain(self) -> str:
        """Why it does not start, in a sentence that says what to do."""
        return (
            f"{self.name} cannot start from {self.data}: {self._complaint()}. Correct that, or restore the directory "
            f"from a backup, or move it away to begin with an empty one; the whole log is {self.log}."
        )

    def _complaint(self) -> str:
        """Its own reason: the last of the worst that it has logged since it was launched."""
        lines: list[str] = []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read(2**20).decode("utf-8", "replace").splitlines()
        for mark in self.complaint_marks:
            for line in reversed(lines):
                if mark in line and "WARNING" not in line:
                    # Valkey goes on to recommend a program that its wheel does not bring.
                    return line.partition(mark)[2].partition(": make a backup")[0].strip().rstrip(".")
        return next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "it gives no reason")

    def _end_leftover(self) -> None:
        """End a server that an earlier supervisor, killed itself, left on this data directory.

        Found by the directory it works in, not by its pid file: that one it removes some time before it ends, and
        what it does last is to remove its socket, which would be its successor's by then.
        """
        left = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error, OSError):
                if process.info["name"] == self.program and Path(process.cwd()) == self.data.resolve():
                    process.send_signal(self.stop_signal)
                    left.append(process)
        _, stubborn = psutil.wait_procs(left, timeout=10)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=5)
