"""The CPU time and the memory of an idle installation, by kind of process.

The installation is that of `make run` with its defaults: `manage.py up` with an empty CODEQ_HOME and a free port. The
figures come from /proc: CPU time, which other load on the machine hardly affects, and the proportional set size (PSS),
which divides shared memory among the processes that share it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil

from codeq_site import sockets

READY_SECONDS = 120
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# Variables that are not passed on, so that the installation has its defaults.
SETTING_PREFIXES = ("CODEQ_", "REDIS_URL", "DATABASE_URL", "CELERY_BROKER_URL", "SECRET_KEY", "DJANGO_")


class Usage(NamedTuple):
    """The CPU time of a process in seconds, and its memory in MiB."""

    cpu: float
    pss: float


def measure_idle(seconds: float, settle_seconds: float) -> None:
    """Start an installation, wait until it is idle, and print a table of its processes."""
    home = Path(tempfile.mkdtemp(prefix="codeq-i"))
    listener = sockets.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(SETTING_PREFIXES)}
    argv = [sys.executable, "manage.py", "up", "--home", str(home / "var"), "--port", str(port)]
    with (home / "log").open("wb") as log:
        up = subprocess.Popen(argv, env=environ, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while b"codeQ is ready" not in (home / "log").read_bytes():
            if up.poll() is not None or time.monotonic() > deadline:
                sys.exit((home / "log").read_text(encoding="utf-8", errors="replace"))
            time.sleep(0.2)
        time.sleep(settle_seconds)
        print_table(psutil.Process(up.pid), seconds)
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
        shutil.rmtree(home, ignore_errors=True)


def print_table(root: psutil.Process, seconds: float) -> None:
    before = read_usage(root)
    started = time.monotonic()
    time.sleep(seconds)
    after = read_usage(root)
    elapsed = time.monotonic() - started
    # A process that ended meanwhile is not counted, and one that started counts from its start.
    rows: defaultdict[str, list[Usage]] = defaultdict(list)
    for process, usage in after.items():
        cpu_before = before[process].cpu if process in before else 0.0
        rows[kind_of(process, root)].append(Usage(usage.cpu - cpu_before, usage.pss))
    rows["all"] = [usage for usages in rows.values() for usage in usages]
    print(f"{'kind':<20}{'processes':>10}{'CPU of a core':>15}{'PSS':>12}")
    for kind, usages in rows.items():
        cpu = sum(usage.cpu for usage in usages) / elapsed
        print(f"{kind:<20}{len(usages):>10}{cpu:>15.2%}{sum(usage.pss for usage in usages):>8.0f} MiB")


def read_usage(root: psutil.Process) -> dict[psutil.Process, Usage]:
    usages = {}
    for process in [root, *root.children(recursive=True)]:
        directory = Path("/proc", str(process.pid))
        try:
            # The fields after the name, which is in parentheses and may contain blanks.
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            lines = (directory / "smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        usages[process] = Usage((int(fields[11]) + int(fields[12])) / CLOCK_TICKS, kilobytes / 1024)
    return usages


def kind_of(process: psutil.Process, root: psutil.Process) -> str:
    """Return the kind of a process by its name or its command line."""
    if process == root:
        return "supervisor"
    words = f"{process.name()} {' '.join(process.cmdline())}"
    parent = process.parent()
    is_pool = parent is not None and parent.name() == process.name()
    marks = {
        "celery-worker": "Celery pool" if is_pool else "Celery worker",
        "celery-beat": "Celery beat",
        "web-": "web",
        "broker.sock": "Valkey (broker)",
        "valkey.sock": "Valkey",
        "postgres": "PostgreSQL",
    }
    return next((kind for mark, kind in marks.items() if mark in words), words[:20])
