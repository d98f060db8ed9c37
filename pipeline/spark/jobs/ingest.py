"""The Spark job `ingest`: copy new audit rows to Parquet files by day and tenant.

Late rows are added to their days, unless the day is more than `HORIZON_DAYS` before the newest day in the lake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import files, schemas, sinks, snapshots, sources
from pipeline.spark.jobs.context import JobContext, JobReport
from pipeline.spark.lake import Manifest, Partition, new_run_id
from pipeline.spark.transforms.attempts import LATE, add_rejection_reason

# The audit table, the tables of valid and of rejected rows, and the facts that are computed from the valid rows.
FEEDS = (
    (snapshots.ATTEMPTS, schemas.RAW, schemas.REJECTED, schemas.ATTEMPTS),
    (snapshots.DELIVERIES, schemas.DELIVERIES_RAW, schemas.DELIVERIES_REJECTED, schemas.DELIVERIES),
)


class AuditTrimmed(RuntimeError):
    """The audit has fewer rows than the lake. Reading the day again would lose rows."""


def ingest(context: JobContext) -> JobReport:
    total = JobReport("ingest")
    if not (context.files or context.dsn):
        return replace(total, notes=("no database is configured",))
    for feed in FEEDS[:1] if context.files else FEEDS:
        report = _ingest_table(context, *feed)
        total = replace(
            total,
            rows_in=total.rows_in + report.rows_in,
            rows_out=total.rows_out + report.rows_out,
            quarantined=total.quarantined + report.quarantined,
            late_dropped=total.late_dropped + report.late_dropped,
            partitions=total.partitions + report.partitions,
            notes=total.notes + report.notes,
        )
    return total


def _ingest_table(
    context: JobContext,
    audit: snapshots.AuditTable,
    raw: schemas.TableContract,
    rejected: schemas.TableContract,
    facts: schemas.TableContract,
) -> JobReport:
    lake, root = context.lake, context.lake.root()
    before, rejected_before = lake.manifest(raw.name, root), lake.manifest(rejected.name, root)
    settled_before = int(before.state.get("settled", 0))
    with _open_source(context, audit, settled_before) as (source, settled, notes):
        if source is None:
            return JobReport("ingest", notes=notes)
        context.report_progress("ingest", f"reading {audit.table}")
        rows = add_rejection_reason(source, audit.contract, audit.day, closed_before=_find_closing_day(context, before))
        # Write valid and rejected rows in one pass over the source, as separate partitions.
        split = rows.withColumn("kind", F.when(F.col("reason").isNull(), "good").otherwise("bad"))
        staged = sinks.write(split, lake, f"{raw.name}/run={new_run_id()}", raw, "kind")
    context.report_progress("ingest", f"staged {len(staged)} partitions of {audit.table}")
    good = sinks.count_rows(context.spark, lake, raw, _select_kind(staged, "good"), digest=False)
    bad = sinks.count_rows(context.spark, lake, rejected, _select_kind(staged, "bad"), digest=False)
    reasons = _count_reasons(context, rejected, bad)
    if context.is_forced:
        _check_not_trimmed(context, lake.manifest(facts.name, root), good)
    state = {**before.state, "settled": max(settled_before, settled)}
    if good or bad or state != before.state:
        changes = {raw.name: Manifest(_merge_partitions(context, before, good), {}, state)}
        if bad or context.is_forced:
            changes[rejected.name] = Manifest(_merge_partitions(context, rejected_before, bad))
        context.report_progress("ingest", f"publishing {audit.table}")
        lake.commit(root, changes)
    late = reasons.get(LATE, 0)
    rejected_rows, good_rows = sum(reasons.values()), sum(partition.rows for partition in good.values())
    return JobReport(
        "ingest",
        rows_in=good_rows + rejected_rows,
        rows_out=good_rows,
        quarantined=rejected_rows - late,
        late_dropped=late,
        partitions=len(good),
        notes=notes + tuple(f"{count} x {reason}" for reason, count in sorted(reasons.items())),
    )


@contextlib.contextmanager
def _open_source(
    context: JobContext, audit: snapshots.AuditTable, settled_before: int
) -> Iterator[tuple[DataFrame | None, int, tuple[str, ...]]]:
    """Yield the rows to read, the id up to which they are settled, and notes.

    The rows are None if nothing is new.
    """
    if context.files:
        frame, excluded = files.read(context.spark, context.files, audit.contract)
        yield frame, 0, tuple(excluded)
    elif not snapshots.has_table(context.dsn, audit):
        yield None, 0, (f"the database has no table {audit.table}",)
    else:
        after = 0 if context.is_forced else settled_before
        with snapshots.hold_snapshot(context.dsn, audit, after=after) as snapshot:
            if snapshot.lowest > snapshot.highest:
                yield None, settled_before, ()
                return
            between = (context.since or date(2000, 1, 1), context.until or date(2200, 1, 1))
            frame = sources.read(
                context.spark, context.dsn, snapshot, audit, between=between if context.is_forced else None
            )
            # After a run over selected days, rows of other days may still be missing: keep the settled id.
            yield frame, 0 if context.is_forced else snapshot.settled, ()


def _find_closing_day(context: JobContext, raw: Manifest) -> date | None:
    """Return the day before which rows are dropped as late, or None if no rows are dropped.

    It is counted from the newest day in the lake, not from the current date, so that a run repeated tomorrow drops the
    same rows.
    """
    if context.is_forced or context.files or not raw.partitions:
        return None
    # Ignore rows in the future, which a wrong clock causes, so that they do not close the current days.
    today = datetime.now(UTC).date().isoformat()
    newest = max((day for day in (key.split("/")[0] for key in raw.partitions) if day <= today), default="")
    return date.fromisoformat(newest) - timedelta(days=context.horizon_days) if newest else None


def _select_kind(staged: Mapping[str, Partition], kind: str) -> dict[str, Partition]:
    return {key.split("/", 1)[1]: part for key, part in staged.items() if key.split("/", 1)[0] == kind}


def _merge_partitions(context: JobContext, before: Manifest, new: Mapping[str, Partition]) -> dict[str, Partition]:
    """Return the partitions after this run.

    New files are added or, on days that were read again, replace the old files.
    """
    result = dict(before.partitions)
    if context.is_forced:
        result = {key: part for key, part in result.items() if not context.is_in_period(key)}
    for key, part in new.items():
        old = result.get(key, Partition((), 0))
        # Checksums correspond to files by position. If an earlier release wrote files without them, keep none.
        sums = old.sums + part.sums if len(old.sums) == len(old.files) else ()
        result[key] = Partition(old.files + part.files, old.rows + part.rows, sums=sums)
    return result


def _check_not_trimmed(context: JobContext, facts: Manifest, new: Mapping[str, Partition]) -> None:
    trimmed = [
        key
        for key, part in facts.partitions.items()
        if context.is_in_period(key) and (key not in new or new[key].rows < part.rows)
    ]
    if trimmed:
        raise AuditTrimmed(f"{AuditTrimmed.__doc__} {', '.join(sorted(trimmed)[:5])}")


def _count_reasons(
    context: JobContext, rejected: schemas.TableContract, bad: Mapping[str, Partition]
) -> dict[str, int]:
    if not bad:
        return {}
    rows = sinks.load(context.spark, context.lake, rejected, Manifest(bad), bad)
    return {row["reason"]: row["count"] for row in rows.groupBy("reason").count().collect()}
