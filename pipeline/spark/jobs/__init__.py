"""The jobs: what is read, which transform, where it goes. `JOBS` is their order; each can be run alone, and again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeline.spark.jobs import facts, ingest, marts, publish
from pipeline.spark.jobs.running import Context, Job, Report
from pipeline.spark.lake import Conflict

__all__ = ["JOBS", "Context", "Report", "run"]

TRIES = 20
JOBS: dict[str, Job] = {
    "ingest": ingest.ingest,
    "attempts": facts.attempts,
    "deliveries": facts.deliveries,
    **{name: marts.job(name) for name in marts.TRANSFORMS},
    "publish": publish.publish,
}


def run(context: Context, names: Iterable[str] = ()) -> Iterator[Report]:
    """Run these jobs, or all, in their order. Each one's report comes as it ends."""
    wanted = set(names) or set(JOBS)
    unknown = wanted - JOBS.keys()
    if unknown:
        raise ValueError(f"no such job: {', '.join(sorted(unknown))} (there are {', '.join(JOBS)})")
    for name, job in JOBS.items():
        if name in wanted:
            yield _run(context, name, job)


def _run(context: Context, name: str, job: Job) -> Report:
    """Run one job, and again from what is there now where another run was first."""
    began = time.monotonic()
    tries = 0
    while True:
        context.told(name, "started")
        try:
            report = job(context)
        except Conflict as conflict:
            tries += 1
            if tries == TRIES:
                raise
            context.told(name, f"again: {conflict}")
        else:
            report = replace(report, seconds=round(time.monotonic() - began, 3))
            context.told(name, f"ended: {report.rows_in} rows in, {report.rows_out} out, {report.seconds} s")
            return report
