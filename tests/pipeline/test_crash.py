"""Spark's JVM is killed in the middle: nobody sees half of anything, and the next run ends where a clean one does.

`make test` kills at a few points; CODEQ_TEST_KILLS=20 at as many as one wants.
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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from pipeline.spark.lake import Lake
from tests.pipeline.conftest import QUICK
from tests.pipeline.history import Audit, attempt, digests
from tests.waiting import until

JOBS = ("ingest", "attempts", "usage")
KILLS = int(os.environ.get("CODEQ_TEST_KILLS", "2"))
# What a run says, and so when it can be struck, and what is killed: Spark's JVM, or the driver with it. Further ones
# strike some time after one of these.
MOMENTS = [
    ("attempts: started", 0.3, "jvm"),
    ("ingest: publishing", 0.0, "all"),
    ("attempts: staged", 0.0, "jvm"),
    ("usage: staged", 0.0, "all"),
    ("ingest: reading", 0.2, "jvm"),
    ("attempts: publishing", 0.0, "all"),
    ("usage: publishing", 0.0, "all"),
    ("ingest: staged", 0.0, "jvm"),
    ("usage: started", 0.1, "all"),
]
# New York's clocks jump at 07:00 UTC that day: the children live there, and must not notice.
DST = datetime(2026, 3, 8, tzinfo=UTC)


def rows(seed: int, count: int = 200) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        attempt(DST + timedelta(minutes=rng.randrange(-1440, 2880)), tenant_id=rng.choice(["acme0001", "beta0002"]))
        for _ in range(count)
    ]


def struck(lake: Lake, audit: Audit, moment: str, delay: float, what: str) -> None:
    """Run the jobs in a process of its own and kill its JVM, or all of it, at that moment."""
    command = [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--dsn-file", "-", "--lake", lake.url]
    command += [word for key, value in QUICK.items() for word in ("--conf", f"{key}={value}")]
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
            if line.startswith(moment):
                time.sleep(delay)  # the moment is between two lines
                children = psutil.Process(process.pid).children(recursive=True)
                if what == "all":
                    process.kill()
                for child in children:
                    if what == "all" or "java" in child.name():
                        child.kill()
                break
        else:
            pytest.fail(f"the run never said {moment!r}")
        process.stdout.read()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def reader(lake: Lake, *expected: int) -> Iterator[list[int]]:
    """Read the facts over and over as somebody with nothing but pyarrow would, and hold them against the pointer."""
    done, seen, wrong = threading.Event(), [], []

    def read() -> None:
        while not done.is_set():
            manifest = lake.manifest("attempts")
            read = sum(
                pq.read_table(p.removeprefix("file://"), columns=["id"], partitioning=None).num_rows
                for p in lake.paths(manifest, manifest.partitions)
            )
            seen.append(read)
            if read != manifest.rows or read not in expected:
                wrong.append((read, manifest.rows))
            done.wait(0.02)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    assert wrong == []


@pytest.mark.timeout(120 + 90 * KILLS)
@pytest.mark.spec("PIP-2", "Spark killed at any point leaves what the next run makes whole; readers never see half")
def test_a_killed_run_is_made_whole_by_the_next(run: Any, lake: Lake, audit: Audit, tmp_path: Path) -> None:
    audit.add(rows(1))
    run(*JOBS)
    rng = random.Random(20)
    moments = MOMENTS[:KILLS] + [
        (name, rng.random(), what) for name, _, what in (rng.choice(MOMENTS) for _ in range(KILLS - len(MOMENTS)))
    ]
    total = 200
    for seed, (moment, delay, what) in enumerate(moments, 2):
        audit.add(rows(seed, 50))
        with reader(lake, total, total + 50) as seen:
            struck(lake, audit, moment, delay, what)
            until(lambda seen=seen: seen, 10)
            run(*JOBS)
        total += 50
        assert lake.manifest("attempts").rows == total
    clean = Lake(str(tmp_path / "clean"))
    run(*JOBS, lake=clean)
    assert digests(lake, "attempts", "usage") == digests(clean, "attempts", "usage")
    assert {key: part.rows for key, part in lake.manifest("attempts").partitions.items()} == audit.totals()
