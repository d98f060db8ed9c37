"""One Spark session on two cores for all tests of the pipeline, and an audit in the tests' own PostgreSQL.

Tests marked for the session belong to one xdist worker (`--dist loadgroup`): two JVMs would only wait for each other.
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

# A few rows a query: compiling it would take longer than answering it.
QUICK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# Its jars are none of codeQ's dependencies: `make test-s3a` fetches them.
collect_ignore = [] if "CODEQ_TEST_S3A_JARS" in os.environ else ["test_s3a.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    # PySpark leaves its callback and gateway sockets to the end of the process.
    os.environ["PYTHONWARNINGS"] = "ignore"
    started = session.start("local[2]", name="tests", conf=QUICK)
    yield started
    started.stop()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def audit(transactional_db: None) -> Audit:
    """The audit's tables as Django made them, empty. Rows are committed: Spark reads by connections of its own."""
    return Audit(services.dsn())


@pytest.fixture
def run(spark: Any, lake: Lake, audit: Audit) -> Any:
    """Run jobs on this lake and audit: `run("ingest", "attempts", since=…)`; the reports by job."""

    def running(*names: str, **more: Any) -> dict[str, jobs.JobReport]:
        context = jobs.JobContext(spark, more.pop("lake", lake), audit.dsn, **more)
        return {report.job: report for report in jobs.run(context, names)}

    return running
