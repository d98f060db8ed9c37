"""Running the pipeline from Django: one run at a time, each job on record."""

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

    from pipeline.spark.jobs import Report

logger = logging.getLogger(__name__)

KEEP_DAYS = 90  # of the log of the runs


class AlreadyRunning(RuntimeError):
    """Another run of the pipeline is at work."""


class Told:
    """What a job says while it runs: to the log of the run, and to whoever watches."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.log: RunLog | None = None

    def __call__(self, job: str, stage: str) -> None:
        self.show(f"{job}: {stage}")
        if self.log is not None:
            RunLog.objects.filter(pk=self.log.pk).update(stage=stage)


def dsn() -> str:
    """The database that Django uses, as libpq and so every executor takes it."""
    parameters = connection.get_connection_params()
    known = ("dbname", "user", "password", "host", "port", "sslmode", "sslrootcert", "sslcert", "sslkey", "options")
    return make_conninfo("", **{name: parameters[name] for name in known if parameters.get(name)})


def lake_url() -> str:
    return conf().pipeline.lake or str(conf().home_path / "lake")


def session(settings: dict[str, str] | None = None) -> SparkSession:
    from pipeline.spark import session as spark

    return spark.start(conf().spark_master, conf=settings)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """The right to run. PostgreSQL takes it back when this process ends, however it ends.

    It saves doing work twice. That two runs at once would change nothing is the lake's doing.
    """
    with psycopg.connect(dsn(), autocommit=True) as held:
        row = held.execute("SELECT pg_try_advisory_lock(hashtextextended('codeq:pipeline', 0))").fetchone()
        if not (row and row[0]):
            raise AlreadyRunning(AlreadyRunning.__doc__)
        yield


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
    """Run these jobs, or all, each as a row of the log. A job that fails ends the run with its error, on record.

    Raises AlreadyRunning where another process has the turn.
    """
    from pipeline.spark import jobs
    from pipeline.spark.lake import Lake

    chosen = jobs.chosen(names)
    with turn():
        # Whoever was running does so no more: the turn is ours.
        RunLog.objects.filter(state=RunLog.State.RUNNING).update(
            state=RunLog.State.FAILED, error="The process ended before the job did.", ended_at=datetime.now(UTC)
        )
        told, this = Told(show), uuid.uuid4()
        context: jobs.Context | None = None
        for name in chosen:
            log = RunLog.objects.create(run=this, job=name, started_at=datetime.now(UTC), master=conf().spark_master)
            told.log = log
            try:
                if context is None:
                    # Within the first job: a Spark that does not start or a lake out of reach is on record, too.
                    spark = session(settings)
                    context = jobs.Context(
                        spark, Lake(lake or lake_url(), spark), dsn(), files=files, since=since, until=until, told=told
                    )
                report = jobs.run_one(context, name)
            except Exception as error:
                _end(log, state=RunLog.State.FAILED, error=_told(error))
                raise
            _end(log, state=RunLog.State.SUCCEEDED, **_numbers(report))
            yield log
        if context is not None:
            context.lake.vacuum()
        RunLog.objects.filter(started_at__lt=datetime.now(UTC) - timedelta(days=KEEP_DAYS)).delete()


def _end(log: RunLog, **values: Any) -> None:
    ended = datetime.now(UTC)
    values = {"ended_at": ended, "seconds": round((ended - log.started_at).total_seconds(), 3), **values}
    for name, value in values.items():
        setattr(log, name, value)
    log.save(update_fields=list(values))


def _numbers(report: Report) -> dict[str, Any]:
    names = ("rows_in", "rows_out", "quarantined", "late_dropped", "partitions")
    return {**{name: getattr(report, name) for name in names}, "notes": "\n".join(report.notes)}


def _told(error: Exception) -> str:
    """The error without the Java stack below it, which says nothing to an operator."""
    text = str(error).strip().partition("\n\nJVM stacktrace")[0].partition("\n\tat ")[0]
    return text[:4000] or type(error).__name__
