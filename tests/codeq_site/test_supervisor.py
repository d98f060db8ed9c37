"""The supervisor restarts crashed processes with backoff and stops all in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from codeq_site.devserver.supervisor import (
    BACKOFF_SECONDS,
    STABLE_SECONDS,
    Child,
    CommandLineProgram,
    StartError,
    StopRequested,
    Supervisor,
    spawn,
)
from tests.waiting import until


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def supervisor(messages: list[str]) -> Iterator[Supervisor]:
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in handled}
    supervisor = Supervisor(messages.append)
    yield supervisor
    supervisor.stop(seconds=0.1)
    supervisor.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def shell(script: str, log: Path) -> CommandLineProgram:
    return CommandLineProgram("it", ["/bin/sh", "-c", script], {"PATH": os.defpath}, log.parent, log)


def ended(child: Child) -> bool:
    return child.process.poll() is not None


def test_crash_loop_is_restarted_with_backoff(supervisor: Supervisor, messages: list[str], tmp_path: Path) -> None:
    child = supervisor.start(shell("echo out of luck; exit 3", tmp_path / "log"))
    now = child.started_at
    delays = []
    for _ in range(len(BACKOFF_SECONDS) + 2):
        until(lambda: ended(child))
        supervisor.restart_ended(now)
        assert child.restart_at is not None
        delays.append(child.restart_at - now)
        first = child.process
        supervisor.restart_ended(child.restart_at - 0.001)
        assert child.process is first, "restarted before its backoff ended"
        now = child.restart_at
        supervisor.restart_ended(now)
        assert child.process is not first
    assert delays == pytest.approx([*BACKOFF_SECONDS, BACKOFF_SECONDS[-1], BACKOFF_SECONDS[-1]])
    assert messages[0] == "it ended with exit code 3; it restarts in 0.2 s. Its last log line: out of luck"
    assert messages[1].startswith("it runs again (pid ")


def test_backoff_is_reset_after_a_steady_run(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(shell("exit 1", tmp_path / "log"))
    child.crashes = 4
    until(lambda: ended(child))
    now = child.started_at + STABLE_SECONDS + 1
    supervisor.restart_ended(now)
    assert child.restart_at == pytest.approx(now + BACKOFF_SECONDS[0])


def test_failed_restart_is_retried(supervisor: Supervisor, messages: list[str], tmp_path: Path) -> None:
    child = supervisor.start(shell("exit 1", tmp_path / "log"))
    until(lambda: ended(child))
    supervisor.restart_ended(child.started_at)
    child.program = CommandLineProgram("it", ["/does/not/exist"], {}, tmp_path, tmp_path / "log")
    assert child.restart_at is not None
    supervisor.restart_ended(child.restart_at)
    assert "it cannot be started" in messages[-1]
    assert child.restart_at is not None


def test_processes_of_a_crashed_child_are_stopped(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(shell("sleep 600 & echo $!; exec sleep 600", tmp_path / "log"))
    grandchild = psutil.Process(int(until(lambda: (tmp_path / "log").read_text().strip())))
    child.process.send_signal(signal.SIGKILL)
    until(lambda: ended(child))
    supervisor.restart_ended(child.started_at)
    until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


def test_child_that_ignores_sigterm_is_killed(supervisor: Supervisor, messages: list[str], tmp_path: Path) -> None:
    supervisor.start(shell("trap '' TERM; echo ready; while :; do sleep 1; done", tmp_path / "log"))
    until(lambda: "ready" in (tmp_path / "log").read_text())
    started = time.monotonic()
    supervisor.stop(seconds=0.3)
    assert time.monotonic() - started < 15
    assert supervisor.children == []
    assert messages == ["it did not stop in 0.3 s and was killed."]


def test_signal_ends_every_pause(supervisor: Supervisor) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopRequested):
        supervisor.pause(30)
    with pytest.raises(StopRequested):
        supervisor.pause(30)


def test_end_of_a_child_ends_a_pause(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(shell("exit 0", tmp_path / "log"))
    started = time.monotonic()
    supervisor.pause(30)
    assert time.monotonic() - started < 25


def test_child_that_ends_before_it_is_ready_is_reported(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(shell("exit 1", tmp_path / "log"))
    with pytest.raises(StartError, match="because"):
        supervisor.wait_until_ready(child, lambda: False, lambda: "because")


@pytest.mark.skipif(sys.platform != "linux", reason="the parent death signal exists only on Linux")
def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal; from pathlib import Path; from codeq_site.devserver.supervisor import spawn\n"
            "print(spawn(['sleep', '600'], log=Path('log')).pid, flush=True); signal.pause()",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        child = psutil.Process(int(output.readline()))
    parent.kill()
    parent.wait(5)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_ctrl_c_in_the_terminal_is_not_sent_to_children(tmp_path: Path) -> None:
    process = spawn(["sleep", "600"], log=tmp_path / "log")
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    process.kill()
    process.wait(5)
