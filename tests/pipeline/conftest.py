"""Fixtures of the pipeline's tests: a Spark session on two cores, an audit and a lake.

All tests of this directory run in one xdist worker (`TOGETHER` in tests/conftest.py), because two JVMs would compete
for the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import services
from pipeline.spark import jobs, session
from pipeline.spark.lake import Lake
from tests.pipeline.history import Audit

# A session starts faster without the optimising compiler and without verifying Spark's classes. Without that compiler,
# Java reserves 48 MB for compiled code. The tests fill that, so Java would discard code and compile it again. A larger
# young generation and a larger initial metaspace need fewer collections.
FAST_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m -Xmn256m"
)
# The queries read a few rows, so compiling them would take longer than interpreting them.
FAST_CONF = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": FAST_JAVA,
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# The S3A jars are not a dependency of codeQ. `make test-s3a` downloads them.
collect_ignore = [] if "CODEQ_TEST_S3A_JARS" in os.environ else ["test_s3a.py"]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    # PySpark closes its callback and gateway sockets only when the process ends, which causes ResourceWarnings.
    os.environ["PYTHONWARNINGS"] = "ignore"
    started = session.start("local[2]", name="tests", conf=FAST_CONF)
    yield started
    started.stop()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def audit(transactional_db: None) -> Audit:
    """The audit's empty tables.

    Rows must be committed, because Spark reads with its own connections.
    """
    return Audit(services.dsn())


@pytest.fixture
def run(spark: Any, lake: Lake, audit: Audit) -> Any:
    """Run jobs, as in `run("ingest", "attempts", since=…)`. Return the reports by job."""

    def run_jobs(*names: str, **more: Any) -> dict[str, jobs.JobReport]:
        context = jobs.JobContext(spark, more.pop("lake", lake), audit.dsn, **more)
        return {report.job: report for report in jobs.run(context, names)}

    return run_jobs
