"""Run the pipeline from Django: one run at a time, with a log entry for each Spark job."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import connection
from psycopg.conninfo import make_conninfo

from core.conf import conf
from pipeline.models import RunLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipeline.spark.jobs import JobReport

logger = logging.getLogger(__name__)

KEEP_DAYS = 90  # age at which entries of the run log are deleted


class AlreadyRunning(RuntimeError):
    """Another run of the pipeline is in progress."""


class ProgressReporter:
    """Write the progress of a Spark job to its log entry and to the output."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.log: RunLog | None = None

    def __call__(self, job: str, stage: str) -> None:
        self.show(f"{job}: {stage}")
        if self.log is not None:
            RunLog.objects.filter(pk=self.log.pk).update(stage=stage)


def dsn() -> str:
    """Return the connection string of Django's database in libpq format, for the executors."""
    parameters = connection.get_connection_params()
    supported = ("dbname", "user", "password", "host", "port", "sslmode", "sslrootcert", "sslcert", "sslkey", "options")
    return make_conninfo("", **{name: parameters[name] for name in supported if parameters.get(name)})


def lake_url() -> str:
    return conf().pipeline.lake or str(conf().home_path / "lake")


def start_spark(settings: dict[str, str] | None = None) -> SparkSession:
    from pipeline.spark import session

    return session.start(conf().spark_master, conf=settings)


@contextlib.contextmanager
def acquire_run_lock() -> Iterator[None]:
    """Hold the lock that allows one run at a time.

    Raise AlreadyRunning if another process holds it. PostgreSQL releases this advisory lock when the process ends, even
    if it is killed. The lock only avoids doing work twice: the lake itself keeps two concurrent runs from overwriting
    each other.

    The lock is released explicitly: after a connection is closed, PostgreSQL needs a moment to release its locks, and
    a run that starts in that moment would be refused.
    """
    with psycopg.connect(dsn(), autocommit=True) as lock_connection:
        row = lock_connection.execute("SELECT pg_try_advisory_lock(hashtextextended('codeq:pipeline', 0))").fetchone()
        if not (row and row[0]):
            raise AlreadyRunning(AlreadyRunning.__doc__)
        try:
            yield
        finally:
            with contextlib.suppress(psycopg.OperationalError):  # a lost connection has released the lock already
                lock_connection.execute("SELECT pg_advisory_unlock_all()")


def run(
    names: Sequence[str] = (),
    *,
    lake: str = "",
    since: date | None = None,
    until: date | None = None,
    files: str = "",
    settings: dict[str, str] | None = None,
    show: Callable[[str], None] = logger.info,
) -> Iterator[RunLog]:
    """Run these Spark jobs, or all of them, and yield the log entry of each.

    A job that fails ends the run: its error is logged, and raised. Raises AlreadyRunning if another process holds the
    run lock.
    """
    from pipeline.spark import jobs
    from pipeline.spark.lake import Lake

    selected = jobs.select_jobs(names)
    with acquire_run_lock():
        # This process holds the lock, so an entry that is still marked as running belongs to a killed process.
        RunLog.objects.filter(state=RunLog.JobState.RUNNING).update(
            state=RunLog.JobState.FAILED, error="The process ended before the job finished.", ended_at=datetime.now(UTC)
        )
        progress, run_id = ProgressReporter(show), uuid.uuid4()
        context: jobs.JobContext | None = None
        for name in selected:
            log = RunLog.objects.create(run=run_id, job=name, started_at=datetime.now(UTC), master=conf().spark_master)
            progress.log = log
            try:
                if context is None:
                    # Started within the first job, so that its entry records a failure to start Spark or open the lake.
                    spark = start_spark(settings)
                    context = jobs.JobContext(
                        spark,
                        Lake(lake or lake_url(), spark),
                        dsn(),
                        files=files,
                        since=since,
                        until=until,
                        report_progress=progress,
                    )
                report = jobs.run_one(context, name)
            except Exception as error:
                _finish_log(log, state=RunLog.JobState.FAILED, error=_describe_error(error))
                raise
            _finish_log(log, state=RunLog.JobState.SUCCEEDED, **_report_values(report))
            yield log
        if context is not None:
            context.lake.vacuum()
        RunLog.objects.filter(started_at__lt=datetime.now(UTC) - timedelta(days=KEEP_DAYS)).delete()


def _finish_log(log: RunLog, **values: Any) -> None:
    ended_at = datetime.now(UTC)
    values = {"ended_at": ended_at, "seconds": round((ended_at - log.started_at).total_seconds(), 3), **values}
    for name, value in values.items():
        setattr(log, name, value)
    log.save(update_fields=list(values))


def _report_values(report: JobReport) -> dict[str, Any]:
    names = ("rows_in", "rows_out", "quarantined", "late_dropped", "partitions")
    return {**{name: getattr(report, name) for name in names}, "notes": "\n".join(report.notes)}


def _describe_error(error: Exception) -> str:
    """Return the error's message without the Java stack trace, which does not help an operator."""
    text = str(error).strip().partition("\n\nJVM stacktrace")[0].partition("\n\tat ")[0]
    return text[:4000] or type(error).__name__
