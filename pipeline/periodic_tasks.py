"""The periodic task that runs the pipeline every hour.

The run is a separate process, so that no JVM starts in the Celery worker.
"""

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
    """Update the lake and the marts.

    The next run does the work that an interrupted or failed run left.
    """
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed. Install it with: pip install 'codeq-server[pipeline]'"
    return run_in_process(lock)


def run_in_process(lock: PeriodicTaskLock) -> str:
    """Run the pipeline in a child process while renewing the lock.

    Return the last line of the output.
    """
    command = [sys.executable, "-m", "django", "pipeline", "run", "--settings", "codeq_site.settings"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = ""
    try:
        while True:
            try:
                output = process.communicate(timeout=LOCK_SECONDS / 4)[0].decode(errors="replace")
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
    last_line = output.strip().rpartition("\n")[2][:300]
    if process.returncode:
        raise RuntimeError(f"the pipeline run ended with exit status {process.returncode}: {last_line}")
    return last_line
