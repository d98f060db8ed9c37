"""The pipeline's hourly run. It happens in a process of its own: a JVM has no business in a Celery worker."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from core.periodic_lock import PeriodicTaskLock
from queues.periodic import periodic_task

LOCK_SECONDS = 30.0
STOP_SECONDS = 20.0


@periodic_task("pipeline.run", lock_seconds=LOCK_SECONDS)
def run(lock: PeriodicTaskLock) -> str:
    """Bring the lake and the marts up to date. What a run leaves undone, for whatever reason, the next one does."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'codeq[pipeline]'"
    return run_in_process(lock)


def run_in_process(lock: PeriodicTaskLock) -> str:
    """Run, renewing the turn meanwhile, and return the last line that the run said."""
    command = [sys.executable, "-m", "django", "pipeline", "run", "--settings", "codeq_site.settings"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = ""
    try:
        while True:
            try:
                said = process.communicate(timeout=LOCK_SECONDS / 4)[0].decode(errors="replace")
                break
            except subprocess.TimeoutExpired:
                lock.renew()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    last = said.strip().rpartition("\n")[2][:300]
    if process.returncode:
        raise RuntimeError(f"the pipeline's run ended with {process.returncode}: {last}")
    return last
