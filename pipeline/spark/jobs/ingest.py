"""ingest: the audit to Parquet by day and tenant; only what is new, plus the days that late rows reopen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import files, schemas, sinks, snapshots, sources
from pipeline.spark.jobs.running import Context, Report
from pipeline.spark.lake import Manifest, Partition, new_run
from pipeline.spark.transforms.attempts import LATE, judged

FEEDS = (
    (snapshots.ATTEMPTS, schemas.RAW, schemas.REJECTED, schemas.ATTEMPTS),
    (snapshots.DELIVERIES, schemas.DELIVERIES_RAW, schemas.DELIVERIES_REJECTED, schemas.DELIVERIES),
)


class AuditTrimmed(RuntimeError):
    """The audit holds fewer rows of a day than the lake: reading that day again would lose what was trimmed."""


def ingest(context: Context) -> Report:
    total = Report("ingest")
    if not (context.files or context.dsn):
        return replace(total, notes=("no database was named",))
    for feed in FEEDS[:1] if context.files else FEEDS:
        done = _feed(context, *feed)
        total = replace(
            total,
            rows_in=total.rows_in + done.rows_in,
            rows_out=total.rows_out + done.rows_out,
            quarantined=total.quarantined + done.quarantined,
            late_dropped=total.late_dropped + done.late_dropped,
            partitions=total.partitions + done.partitions,
            notes=total.notes + done.notes,
        )
    return total


def _feed(
    context: Context, audit: snapshots.Audit, raw: schemas.Table, rejected: schemas.Table, facts: schemas.Table
) -> Report:
    lake, root = context.lake, context.lake.root()
    before, refused = lake.manifest(raw.name, root), lake.manifest(rejected.name, root)
    mark = int(before.state.get("settled", 0))
    with _source(context, audit, mark) as (source, settled, notes):
        if source is None:
            return Report("ingest", notes=notes)
        context.told("ingest", f"reading {audit.table}")
        rows = judged(source, audit.contract, audit.day, closed_before=_closed_before(context, before))
        # One pass over the source: what is not counted becomes partitions beside the others.
        split = rows.withColumn("kind", F.when(F.col("reason").isNull(), "good").otherwise("bad"))
        staged = sinks.write(split, lake, f"{raw.name}/run={new_run()}", raw, "kind")
    context.told("ingest", f"staged {len(staged)} partitions of {audit.table}")
    good = sinks.counted(context.spark, lake, raw, _of_kind(staged, "good"), digest=False)
    bad = sinks.counted(context.spark, lake, rejected, _of_kind(staged, "bad"), digest=False)
    reasons = _reasons(context, rejected, bad)
    if context.is_forced:
        _refuse_to_lose(context, lake.manifest(facts.name, root), good)
    state = {**before.state, "settled": max(mark, settled)}
    if good or bad or state != before.state:
        changes = {raw.name: Manifest(_merged(context, before, good), {}, state)}
        if bad or context.is_forced:
            changes[rejected.name] = Manifest(_merged(context, refused, bad))
        context.told("ingest", f"publishing {audit.table}")
        lake.commit(root, changes)
    late = reasons.get(LATE, 0)
    read, kept = sum(reasons.values()), sum(partition.rows for partition in good.values())
    return Report(
        "ingest",
        rows_in=kept + read,
        rows_out=kept,
        quarantined=read - late,
        late_dropped=late,
        partitions=len(good),
        notes=notes + tuple(f"{count} x {reason}" for reason, count in sorted(reasons.items())),
    )


@contextlib.contextmanager
def _source(
    context: Context, audit: snapshots.Audit, mark: int
) -> Iterator[tuple[DataFrame | None, int, tuple[str, ...]]]:
    """What to read, up to which id it is settled, and what was left out; None where there is nothing new."""
    if context.files:
        frame, left_out = files.read(context.spark, context.files, audit.contract)
        yield frame, 0, tuple(left_out)
    elif not snapshots.exists(context.dsn, audit):
        yield None, 0, (f"there is no {audit.table}",)
    else:
        after = 0 if context.is_forced else mark
        with snapshots.held(context.dsn, audit, after=after) as moment:
            if moment.lowest > moment.highest:
                yield None, mark, ()
                return
            between = (context.since or date(2000, 1, 1), context.until or date(2200, 1, 1))
            frame = sources.read(
                context.spark, context.dsn, moment, audit, between=between if context.is_forced else None
            )
            # Some days of everything say nothing about the other days.
            yield frame, 0 if context.is_forced else moment.settled, ()


def _closed_before(context: Context, raw: Manifest) -> date | None:
    """The day before which days are closed for good, counted from the newest day that the lake has: the machine's
    clock would make a run that is repeated tomorrow drop other rows than today's."""
    if context.is_forced or context.files or not raw.partitions:
        return None
    # A row from the future, of a clock gone wrong, must not close the present.
    today = datetime.now(UTC).date().isoformat()
    newest = max((day for day in (key.split("/")[0] for key in raw.partitions) if day <= today), default="")
    return date.fromisoformat(newest) - timedelta(days=context.horizon_days) if newest else None


def _of_kind(staged: Mapping[str, Partition], kind: str) -> dict[str, Partition]:
    return {key.split("/", 1)[1]: part for key, part in staged.items() if key.split("/", 1)[0] == kind}


def _merged(context: Context, before: Manifest, new: Mapping[str, Partition]) -> dict[str, Partition]:
    """The partitions as they will be: added to what is there, or, of days read anew, instead of it."""
    result = dict(before.partitions)
    if context.is_forced:
        result = {key: part for key, part in result.items() if not context.is_asked_for(key)}
    for key, part in new.items():
        old = result.get(key, Partition((), 0))
        # The sums stand beside the files; files from before there were sums have none, and then none has.
        sums = old.sums + part.sums if len(old.sums) == len(old.files) else ()
        result[key] = Partition(old.files + part.files, old.rows + part.rows, sums=sums)
    return result


def _refuse_to_lose(context: Context, facts: Manifest, new: Mapping[str, Partition]) -> None:
    fewer = [
        key
        for key, part in facts.partitions.items()
        if context.is_asked_for(key) and (key not in new or new[key].rows < part.rows)
    ]
    if fewer:
        raise AuditTrimmed(f"{AuditTrimmed.__doc__} {', '.join(sorted(fewer)[:5])}")


def _reasons(context: Context, rejected: schemas.Table, bad: Mapping[str, Partition]) -> dict[str, int]:
    if not bad:
        return {}
    rows = sinks.load(context.spark, context.lake, rejected, Manifest(bad), bad)
    return {row["reason"]: row["count"] for row in rows.groupBy("reason").count().collect()}
