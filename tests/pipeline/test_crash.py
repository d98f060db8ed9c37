"""Kill Spark during a run: readers never see partial data, and the next run recovers.

`make test` kills at a few points. Set CODEQ_TEST_KILLS=20 to kill at more.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from pipeline.spark.lake import Lake
from tests.pipeline.conftest import FAST_CONF
from tests.pipeline.history import Audit, build_attempts_around_dst, count_rows, read_digests
from tests.pipeline.kills import MOMENTS
from tests.waiting import until

JOBS = ("ingest", "attempts", "usage")
KILLS = int(os.environ.get("CODEQ_TEST_KILLS", "2"))


def run_and_kill(lake: Lake, audit: Audit, message: str, delay_seconds: float, target: str) -> None:
    """Run the jobs in a child process, and kill it or only its JVM after this message.

    The process runs in New York's time zone, whose clocks change on one of the days: that must not affect the result.
    """
    command = [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--dsn-file", "-", "--lake", lake.url]
    command += [word for key, value in FAST_CONF.items() for word in ("--conf", f"{key}={value}")]
    process = subprocess.Popen(
        [*command, "run", *JOBS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TZ": "America/New_York"},
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(audit.dsn)
    process.stdin.close()
    try:
        for line in process.stdout:
            if line.startswith(message):
                time.sleep(delay_seconds)  # kill between two messages
                children = psutil.Process(process.pid).children(recursive=True)
                if target == "all":
                    process.kill()
                for child in children:
                    if target == "all" or "java" in child.name():
                        child.kill()
                break
        else:
            pytest.fail(f"the run never printed {message!r}")
        process.stdout.read()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def check_reads(lake: Lake, *expected: int) -> Iterator[list[int]]:
    """Read the facts repeatedly with pyarrow, and compare their number with the manifest."""
    done, row_counts, errors = threading.Event(), [], []

    def read() -> None:
        while not done.is_set():
            manifest = lake.manifest("attempts")
            row_count = sum(
                pq.read_table(p.removeprefix("file://"), columns=["id"], partitioning=None).num_rows
                for p in lake.paths(manifest, manifest.partitions)
            )
            row_counts.append(row_count)
            if row_count != manifest.rows or row_count not in expected:
                errors.append((row_count, manifest.rows))
            done.wait(0.02)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield row_counts
    finally:
        done.set()
        thread.join()
    assert errors == []


@pytest.mark.timeout(120 + 90 * KILLS)
@pytest.mark.spec(
    "PIP-2", "After Spark is killed at any point, the next run completes the work; readers never see partial data"
)
def test_next_run_completes_a_killed_run(run: Any, lake: Lake, audit: Audit, tmp_path: Path) -> None:
    audit.add(build_attempts_around_dst(1))
    run(*JOBS)
    rng = random.Random(20)
    moments = MOMENTS[:KILLS] + [
        (message, rng.random(), target)
        for message, _, target in (rng.choice(MOMENTS) for _ in range(KILLS - len(MOMENTS)))
    ]
    total = 200
    for seed, (message, delay_seconds, target) in enumerate(moments, 2):
        audit.add(build_attempts_around_dst(seed, 50))
        with check_reads(lake, total, total + 50) as row_counts:
            run_and_kill(lake, audit, message, delay_seconds, target)
            until(lambda row_counts=row_counts: row_counts, 10)
            run(*JOBS)
        total += 50
        assert lake.manifest("attempts").rows == total
    clean = Lake(str(tmp_path / "clean"))
    run(*JOBS, lake=clean)
    assert read_digests(lake, "attempts", "usage") == read_digests(clean, "attempts", "usage")
    assert count_rows(lake) == audit.count_per_partition()
