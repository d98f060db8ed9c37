"""The jobs: what is read, which transform, where it goes. `JOBS` is their order; each can be run alone, and again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeline.spark.jobs import compact, facts, ingest, marts, publish
from pipeline.spark.jobs.running import Context, Job, Report
from pipeline.spark.lake import Conflict

__all__ = ["JOBS", "Context", "Report", "chosen", "run", "run_one"]

TRIES = 20
JOBS: dict[str, Job] = {
    "ingest": ingest.ingest,
    "attempts": facts.attempts,
    "deliveries": facts.deliveries,
    "compact": compact.compact,
    **{name: marts.job(name) for name in marts.TRANSFORMS},
    "publish": publish.publish,
}


def chosen(names: Iterable[str] = ()) -> list[str]:
    """These jobs, or all, in the order in which they build on each other."""
    wanted = set(names) or set(JOBS)
    unknown = wanted - JOBS.keys()
    if unknown:
        raise ValueError(f"no such job: {', '.join(sorted(unknown))} (there are {', '.join(JOBS)})")
    return [name for name in JOBS if name in wanted]


def run(context: Context, names: Iterable[str] = ()) -> Iterator[Report]:
    """Run these jobs, or all. Each one's report comes as it ends."""
    for name in chosen(names):
        yield run_one(context, name)


def run_one(context: Context, name: str) -> Report:
    """Run one job, and again from what is there now where another run was first."""
    began = time.monotonic()
    tries = 0
    while True:
        context.told(name, "started")
        try:
            report = JOBS[name](context)
        except Conflict as conflict:
            tries += 1
            if tries == TRIES:
                raise
            context.told(name, f"again: {conflict}")
        else:
            report = replace(report, seconds=round(time.monotonic() - began, 3))
            context.told(name, f"ended: {report.rows_in} rows in, {report.rows_out} out, {report.seconds} s")
            return report
