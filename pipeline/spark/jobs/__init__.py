"""The Spark jobs. Each job reads tables, applies a transform and publishes the result.

`JOBS` lists them in the order of a run. Each job can be run alone, and repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeline.spark.jobs import compact, facts, ingest, marts, publish
from pipeline.spark.jobs.context import JobContext, JobReport, SparkJob
from pipeline.spark.lake import PublishConflict

__all__ = ["JOBS", "JobContext", "JobReport", "run", "run_one", "select_jobs"]

MAX_TRIES = 20
JOBS: dict[str, SparkJob] = {
    "ingest": ingest.ingest,
    "attempts": facts.attempts,
    "deliveries": facts.deliveries,
    "compact": compact.compact,
    **{name: marts.build_job(name) for name in marts.TRANSFORMS},
    "publish": publish.publish,
}


def select_jobs(names: Iterable[str] = ()) -> list[str]:
    """Return these jobs, or all jobs, in the order of their dependencies."""
    selected = set(names) or set(JOBS)
    unknown = selected - JOBS.keys()
    if unknown:
        raise ValueError(f"no such job: {', '.join(sorted(unknown))} (jobs: {', '.join(JOBS)})")
    return [name for name in JOBS if name in selected]


def run(context: JobContext, names: Iterable[str] = ()) -> Iterator[JobReport]:
    """Run these jobs, or all jobs, and yield the report of each when it ends."""
    for name in select_jobs(names):
        yield run_one(context, name)


def run_one(context: JobContext, name: str) -> JobReport:
    """Run one job. Repeat it with the current tables if another run published a change first."""
    started = time.monotonic()
    tries = 0
    while True:
        context.report_progress(name, "started")
        try:
            report = JOBS[name](context)
        except PublishConflict as conflict:
            tries += 1
            if tries == MAX_TRIES:
                raise
            context.report_progress(name, f"retrying: {conflict}")
        else:
            report = replace(report, seconds=round(time.monotonic() - started, 3))
            context.report_progress(name, f"ended: {report.rows_in} rows in, {report.rows_out} out, {report.seconds} s")
            return report
