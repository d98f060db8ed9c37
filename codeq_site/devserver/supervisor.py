"""Start, restart and stop child processes, which end with their parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds before each further restart: short after a single crash, long in a crash loop.
BACKOFF_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
# A program that ran this long has recovered: its next restart uses the first delay again.
STABLE_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class StartError(Exception):
    """A program cannot start. The message is one sentence that says what to do."""


class StopRequested(Exception):
    """The supervisor received Ctrl-C or SIGTERM, or its terminal was closed."""


@dataclass(frozen=True)
class Account:
    """A user of the operating system that runs a program."""

    name: str
    uid: int
    gid: int


def spawn(
    argv: Sequence[str],
    *,
    log: Path | None,
    stdout: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    account: Account | None = None,
    death_signal: int = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that Ctrl-C reaches only the supervisor.

    When this process dies, even by SIGKILL, Linux sends `death_signal` to the child. Call this function from the main
    thread: the kernel treats the end of the calling thread as the end of the parent. Without a log, the program writes
    to the stderr of this process.
    """
    parent = os.getpid()

    def prepare_child() -> None:
        # Popen calls this after setuid, which is necessary: a change of user clears the death signal.
        die_with(parent, death_signal)

    sink: int | None = None
    if log is not None:
        sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about fork in a process with threads. It is safe: `prepare_child` takes no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=stdout if stdout is not None else sink if sink is not None else sys.stderr.fileno(),
                stderr=sink,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=prepare_child,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
            )
    finally:
        if sink is not None:
            os.close(sink)


def die_with(parent: int, number: int) -> None:
    """Let Linux send this signal to this process when its parent dies.

    End this process if the parent has died already.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name that `ps -e` and `top` print, on Linux. It is cut to 15 characters."""
    if _libc is not None:
        _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


class Process(Protocol):
    """The part of `subprocess.Popen` that the supervisor uses."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


def signal_group(process: Process, number: int) -> None:
    """Send a signal to a program and all its children, if they still run."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        # macOS returns EPERM for a group of zombies.
        if process.poll() is None:
            process.send_signal(number)


class Program(Protocol):
    """A program that the supervisor keeps running."""

    @property
    def name(self) -> str: ...
    @property
    def stop_signal(self) -> int: ...
    @property
    def log(self) -> Path | None: ...
    def launch(self) -> Process: ...


@dataclass(frozen=True)
class CommandLineProgram:
    """A program that is started with a command line."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path | None
    stdout: int | None = None
    stop_signal: int = signal.SIGTERM

    def launch(self) -> subprocess.Popen[bytes]:
        return spawn(
            self.argv,
            log=self.log,
            stdout=self.stdout,
            env=self.env,
            cwd=self.cwd,
            death_signal=self.stop_signal,
        )


@dataclass
class Child:
    """A program and its current process."""

    program: Program
    process: Process
    started_at: float
    crashes: int = 0
    restart_at: float | None = None


def last_line(log: Path | None) -> str:
    """Return the last line of a log for a message, or "" without a log file."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


@dataclass
class Supervisor:
    """Starts, watches and stops children. It has no thread: it works only while a method runs."""

    report: Callable[[str], None]
    children: list[Child] = field(default_factory=list)
    _stopping: bool = False

    def __post_init__(self) -> None:
        # Each signal writes a byte to a socket. So waiting is one select(), and no signal is lost between two checks.
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup_reader, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _request_stop(self, *_: object) -> None:
        self._stopping = True

    def close(self) -> None:
        """Close the sockets for signals, in a process that continues without this supervisor."""
        signal.set_wakeup_fd(-1)
        self._wakeup_reader.close()
        self._wakeup_writer.close()

    def start(self, program: Program) -> Child:
        child = Child(program, program.launch(), time.monotonic())
        self.children.append(child)
        return child

    def pause(self, seconds: float) -> None:
        """Wait until the time has passed or a signal arrives. Raises StopRequested."""
        if not self._stopping:
            select.select([self._wakeup_reader], [], [], max(0.0, seconds))
            try:
                while self._wakeup_reader.recv(512):
                    pass
            except BlockingIOError:
                pass
        if self._stopping:
            raise StopRequested

    def wait_until_ready(self, child: Child, is_ready: Callable[[], bool], explain: Callable[[], str]) -> None:
        """Wait until a child is ready. Raises StartError with the explanation if it ends."""
        while not is_ready():
            if child.process.poll() is not None:
                raise StartError(explain())
            self.pause(0.02)

    def run(self, program: CommandLineProgram) -> tuple[int, bytes]:
        """Run a program to its end. Return its exit code, and its output if that is a pipe."""
        process = program.launch()
        child = Child(program, process, time.monotonic())
        self.children.append(child)
        while process.poll() is None:
            self.pause(0.5)
        self.children.remove(child)
        return process.returncode, process.stdout.read() if process.stdout else b""

    def watch(self) -> None:
        """Restart children that end, until a stop is requested."""
        while True:
            now = time.monotonic()
            self.restart_ended(now)
            delays = [child.restart_at - now for child in self.children if child.restart_at is not None]
            self.pause(min([5.0, *delays]))

    def restart_ended(self, now: float) -> None:
        """Schedule the restart of children that ended, and start those whose delay has passed."""
        for child in self.children:
            if child.restart_at is None:
                code = child.process.poll()
                if code is None:
                    continue
                signal_group(child.process, signal.SIGKILL)  # its own children would conflict with the next process
                if now - child.started_at > STABLE_SECONDS:
                    child.crashes = 0
                delay = BACKOFF_SECONDS[min(child.crashes, len(BACKOFF_SECONDS) - 1)]
                child.crashes += 1
                child.restart_at = now + delay
                line = last_line(child.program.log)
                self.report(
                    f"{child.program.name} {_describe_end(code)}; it restarts in {delay:g} s."
                    + (f" Its last log line: {line}" if line else "")
                )
            elif child.restart_at <= now:
                try:
                    child.process = child.program.launch()
                except (StartError, OSError) as error:
                    delay = BACKOFF_SECONDS[min(child.crashes, len(BACKOFF_SECONDS) - 1)]
                    child.crashes += 1
                    child.restart_at = now + delay
                    self.report(f"{child.program.name} cannot be started: {error}; the next attempt is in {delay:g} s.")
                    continue
                child.started_at, child.restart_at = now, None
                self.report(f"{child.program.name} runs again (pid {child.process.pid}).")

    def stop(self, children: Sequence[Child] | None = None, *, seconds: float) -> None:
        """Stop these children, by default all. Kill those that do not stop in time."""
        running = list(self.children if children is None else children)
        # A child that waits for its restart has no process, and another program may have its former pid.
        for child in [child for child in running if child.restart_at is not None]:
            running.remove(child)
            self.children.remove(child)
        for child in running:
            if child.process.poll() is None:
                child.process.send_signal(child.program.stop_signal)
        deadline = time.monotonic() + seconds
        for child in running:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.report(f"{child.program.name} did not stop in {seconds:g} s and was killed.")
            signal_group(child.process, signal.SIGKILL)
            child.process.wait()
            self.children.remove(child)


def _describe_end(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
