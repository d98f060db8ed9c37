"""Child processes: started so that none outlives its parent, restarted when they crash, stopped in order."""

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
# A crash loop must not eat the machine, and one crash must not be felt: seconds before each further restart.
BACKOFF_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
# Alive for so long, a program has recovered: its next crash starts from the first step again.
STEADY_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class StartError(Exception):
    """Something cannot be started; the message is one sentence that says what to do."""


class StopRequested(Exception):
    """Somebody asked for an orderly end: Ctrl-C, SIGTERM or a closed terminal."""


@dataclass(frozen=True)
class Account:
    """The operating system's user that a program runs as."""

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
    """Start a program in a session of its own, so that Ctrl-C in the terminal reaches only the supervisor.

    When this process dies, even by SIGKILL, Linux sends `death_signal` to the child. Call it from the main thread:
    the kernel takes the end of the calling thread for the end of the parent. Without a log it writes to our stderr.
    """
    parent = os.getpid()

    def follow_parent() -> None:
        # After setuid on purpose: a change of user clears the death signal.
        if _libc is not None:
            _libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
            if os.getppid() != parent:  # it died between fork and prctl
                os._exit(1)

    sink: int | None = None
    if log is not None:
        sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of fork in a process with threads; `follow_parent` takes no lock and imports nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=stdout if stdout is not None else sink if sink is not None else sys.stderr.fileno(),
                stderr=sink,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=follow_parent,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
            )
    finally:
        if sink is not None:
            os.close(sink)


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a program and everything it started; gone already is fine."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        # macOS answers EPERM for a group of zombies.
        if process.poll() is None:
            process.send_signal(number)


class Program(Protocol):
    """What the supervisor keeps running."""

    @property
    def name(self) -> str: ...
    @property
    def stop_signal(self) -> int: ...
    @property
    def log(self) -> Path | None: ...
    def launch(self) -> subprocess.Popen[bytes]: ...


@dataclass(frozen=True)
class Command:
    """A program that is nothing but its command line."""

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
    """A program that should be running, and its present process."""

    program: Program
    process: subprocess.Popen[bytes]
    started: float
    crashes: int = 0
    restart_at: float | None = None


def last_line(log: Path | None) -> str:
    """The last line a program said, for a message; empty where it logs to our own stderr."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


@dataclass
class Supervisor:
    """Owns the children from their start to their end. Single-threaded: everything happens inside its calls."""

    say: Callable[[str], None]
    children: list[Child] = field(default_factory=list)
    _stopping: bool = False

    def __post_init__(self) -> None:
        # Signals become readable bytes, so that waiting is one select() and no signal is lost between two checks.
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _request_stop(self, *_: object) -> None:
        self._stopping = True

    def close(self) -> None:
        """Let go of the signals' sockets, where the process outlives its supervisor."""
        signal.set_wakeup_fd(-1)
        self._wake.close()
        self._waker.close()

    def start(self, program: Program) -> Child:
        child = Child(program, program.launch(), time.monotonic())
        self.children.append(child)
        return child

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond a signal. Raises StopRequested once somebody has asked for the end."""
        if not self._stopping:
            select.select([self._wake], [], [], max(0.0, seconds))
            try:
                while self._wake.recv(512):
                    pass
            except BlockingIOError:
                pass
        if self._stopping:
            raise StopRequested

    def until_ready(self, child: Child, is_ready: Callable[[], bool], explain: Callable[[], str]) -> None:
        """Wait until a child that is being started is ready; StartError with the explanation when it ends instead."""
        while not is_ready():
            if child.process.poll() is not None:
                raise StartError(explain())
            self.pause(0.02)

    def run(self, program: Program) -> tuple[int, bytes]:
        """Run one program to its end; its exit code, and its output where that is a pipe."""
        child = self.start(program)
        while child.process.poll() is None:
            self.pause(0.5)
        self.children.remove(child)
        return child.process.returncode, child.process.stdout.read() if child.process.stdout else b""

    def watch(self) -> None:
        """Keep every child alive until somebody asks for the end."""
        while True:
            now = time.monotonic()
            self.tend(now)
            due = [child.restart_at - now for child in self.children if child.restart_at is not None]
            self.pause(min([5.0, *due]))

    def tend(self, now: float) -> None:
        """Note who has ended, and start again whose time has come."""
        for child in self.children:
            if child.restart_at is None:
                code = child.process.poll()
                if code is None:
                    continue
                signal_group(child.process, signal.SIGKILL)  # what it had started would fight with its successor
                if now - child.started > STEADY_SECONDS:
                    child.crashes = 0
                delay = BACKOFF_SECONDS[min(child.crashes, len(BACKOFF_SECONDS) - 1)]
                child.crashes += 1
                child.restart_at = now + delay
                words = last_line(child.program.log)
                self.say(
                    f"{child.program.name} {_how(code)}; starting it again in {delay:g} s."
                    + (f" Its last words: {words}" if words else "")
                )
            elif child.restart_at <= now:
                try:
                    child.process = child.program.launch()
                except (StartError, OSError) as error:
                    delay = BACKOFF_SECONDS[min(child.crashes, len(BACKOFF_SECONDS) - 1)]
                    child.crashes += 1
                    child.restart_at = now + delay
                    self.say(f"{child.program.name} cannot be started: {error}; trying again in {delay:g} s.")
                    continue
                child.started, child.restart_at = now, None
                self.say(f"{child.program.name} runs again (pid {child.process.pid}).")

    def stop(self, programs: Sequence[Child] | None = None, *, seconds: float) -> None:
        """End these children (all of them by default) at once: asked first, killed when the time is up."""
        mine = list(self.children if programs is None else programs)
        # Those that wait for their restart have ended and were reaped: their pids may be somebody else's by now.
        for child in [each for each in mine if each.restart_at is not None]:
            mine.remove(child)
            self.children.remove(child)
        for child in mine:
            if child.process.poll() is None:
                child.process.send_signal(child.program.stop_signal)
        deadline = time.monotonic() + seconds
        for child in mine:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.say(f"{child.program.name} did not stop in {seconds:g} s and was killed.")
            signal_group(child.process, signal.SIGKILL)
            child.process.wait()
            self.children.remove(child)


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
