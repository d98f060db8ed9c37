"""The Spark job `compact`: merge the files of past days.

After the end of a day, the files that the hourly runs wrote for it become one file per tenant. Otherwise a year of
hourly runs would leave a file for each tenant and hour: opening the files would take longer than reading them, and
every run would write all their names into a manifest.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.context import JobContext, JobReport
from pipeline.spark.jobs.facts import build_source_id
from pipeline.spark.lake import new_run_id

MAX_FILES = 4
# Each table of raw rows, and the table of facts that is computed from it.
FEEDS = ((schemas.RAW, schemas.ATTEMPTS), (schemas.DELIVERIES_RAW, schemas.DELIVERIES))


def compact(context: JobContext) -> JobReport:
    rows = partitions = 0
    for raw, facts in FEEDS:
        compacted = _compact_table(context, raw, facts)
        rows, partitions = rows + sum(compacted.values()), partitions + len(compacted)
    return JobReport("compact", rows_in=rows, rows_out=rows, partitions=partitions)


def _compact_table(context: JobContext, raw: schemas.TableContract, facts: schemas.TableContract) -> dict[str, int]:
    lake, root = context.lake, context.lake.root()
    raw_manifest, facts_manifest = lake.manifest(raw.name, root), lake.manifest(facts.name, root)
    newest = max((key.split("/")[0] for key in raw_manifest.partitions), default="")
    rows = {
        key: part.rows
        for key, part in raw_manifest.partitions.items()
        if len(part.files) > MAX_FILES
        and key.split("/")[0] < newest
        # The facts must be computed from exactly these files. Then they are also valid for the merged file.
        and facts_manifest.sources.get(key) == build_source_id(facts, part)
    }
    if not rows:
        return {}
    read = sinks.load(context.spark, lake, raw, raw_manifest, rows, context.verified_files)
    # Use the directory layout of ingest: Spark cannot read files together if their paths have different partition
    # columns.
    staged = sinks.stage(sinks.distribute(read, raw, rows), lake, raw, new_run_id(), "/kind=good")
    merged = sinks.count_rows(context.spark, lake, raw, staged, digest=False)
    if {key: part.rows for key, part in merged.items()} != rows:
        raise RuntimeError(f"{raw.name}: the number of rows read back differs from the number written")
    context.report_progress("compact", f"publishing {len(merged)} partitions of {raw.name}")
    sources = {key: build_source_id(facts, part) for key, part in merged.items()}
    lake.commit(
        root,
        {
            raw.name: replace(raw_manifest, partitions={**raw_manifest.partitions, **merged}),
            facts.name: replace(facts_manifest, sources={**facts_manifest.sources, **sources}),
        },
    )
    return rows
