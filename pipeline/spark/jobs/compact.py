"""compact: what was read of a day in many pieces, hour by hour, as one file for each tenant once the day is over.

Else a year of hourly runs is a file for each tenant and hour: opening them would cost more than reading them, and every
run writes all their names into a manifest.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.facts import source_of
from pipeline.spark.jobs.running import Context, Report
from pipeline.spark.lake import new_run

MOST_FILES = 4
FEEDS = ((schemas.RAW, schemas.ATTEMPTS), (schemas.DELIVERIES_RAW, schemas.DELIVERIES))


def compact(context: Context) -> Report:
    rows = partitions = 0
    for raw, facts in FEEDS:
        done = _feed(context, raw, facts)
        rows, partitions = rows + sum(done.values()), partitions + len(done)
    return Report("compact", rows_in=rows, rows_out=rows, partitions=partitions)


def _feed(context: Context, raw: schemas.Table, facts: schemas.Table) -> dict[str, int]:
    lake, root = context.lake, context.lake.root()
    pieces, made = lake.manifest(raw.name, root), lake.manifest(facts.name, root)
    newest = max((key.split("/")[0] for key in pieces.partitions), default="")
    rows = {
        key: part.rows
        for key, part in pieces.partitions.items()
        if len(part.files) > MOST_FILES
        and key.split("/")[0] < newest
        # The facts are of these very files: then they are of the same rows in one file, too.
        and made.sources.get(key) == source_of(facts, part)
    }
    if not rows:
        return {}
    read = sinks.load(context.spark, lake, raw, pieces, rows, context.checked)
    # Beside what ingest writes: Spark reads no two files together whose paths name different columns.
    staged = sinks.stage(sinks.spread(read, raw, rows), lake, raw, new_run(), "/kind=good")
    whole = sinks.counted(context.spark, lake, raw, staged, digest=False)
    if {key: part.rows for key, part in whole.items()} != rows:
        raise RuntimeError(f"{raw.name}: other rows were read back than there are")
    context.told("compact", f"publishing {len(whole)} partitions of {raw.name}")
    sources = {key: source_of(facts, part) for key, part in whole.items()}
    lake.commit(
        root,
        {
            raw.name: replace(pieces, partitions={**pieces.partitions, **whole}),
            facts.name: replace(made, sources={**made.sources, **sources}),
        },
    )
    return rows
