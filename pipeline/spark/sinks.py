"""Where rows go: partitions of the lake, staged under a run's own name, and the marts in PostgreSQL.

Both can be done again at any time: a staged run that nobody published is not seen, and a day and tenant that is
already in PostgreSQL as it should be is not touched.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.lake import Lake, Manifest, Partition
from pipeline.spark.transforms.common import FILE

ROWS_PER_FILE = 1_000_000


def load(
    spark: SparkSession,
    lake: Lake,
    table: schemas.Table,
    manifest: Manifest,
    keys: Iterable[str],
    known: set[str] | None = None,
) -> DataFrame:
    """The rows of these partitions; empty where there are none. Raises Damaged where a file is not what was written;
    files in `known` have been looked at."""
    there = [key for key in keys if key in manifest.partitions]
    lake.check(manifest, there, known)
    paths = lake.paths(manifest, there)
    if not paths:
        return spark.createDataFrame([], table.struct)
    base = f"{lake.url}/{paths[0].removeprefix(lake.url + '/').split('/')[0]}"
    return spark.read.schema(table.struct).option("basePath", base).parquet(*paths).select(table.names)


def only(frame: DataFrame, keys: Iterable[str], *, but: bool = False) -> DataFrame:
    """The rows of these days and tenants; with `but`, those of all others."""
    here = F.concat_ws("/", F.col("date").cast("string"), "tenant").isin(sorted(keys))
    return frame.where(~here if but else here)


def check_files(spark: SparkSession, lake: Lake, table: schemas.Table, manifest: Manifest, keys: Iterable[str]) -> None:
    """Hold one file of each run that wrote these partitions against the contract as it is today."""
    runs: dict[str, str] = {}
    for key in keys:
        for file in manifest.partitions[key].files:
            runs.setdefault(file.split("/date=")[0], file)
    for file in runs.values():
        found = spark.read.parquet(f"{lake.url}/{file}").schema
        schemas.check(table, found, file, but=(*table.partitions, "reason"))


def spread(frame: DataFrame, table: schemas.Table, rows: Mapping[str, int]) -> DataFrame:
    """Bring the rows of each partition of this table together. `rows` says about how many each will have: a big one
    is spread over several files, marked in `FILE`."""
    big = {key: -(-count // ROWS_PER_FILE) for key, count in rows.items() if count > ROWS_PER_FILE}
    if not big:
        return frame.repartition(*table.partitions)
    file: Column = F.lit(0).cast("bigint")
    for key, files in sorted(big.items()):
        here = F.lit(True)
        for name, value in zip(table.partitions, key.split("/"), strict=True):
            here = here & (F.col(name) == F.lit(value))
        file = F.when(here, F.pmod(F.xxhash64(*table.keys), F.lit(files))).otherwise(file)
    return frame.withColumn(FILE, file).repartition(*table.partitions, FILE)


def stage(frame: DataFrame, lake: Lake, table: schemas.Table, run: str, under: str = "") -> dict[str, Partition]:
    """Write a frame that was `spread` as this table's partitions, the rows of each file in the order of the table's
    keys: equal rows make equal files. `under` is a folder inside the run's."""
    order = [*table.partitions, *(name for name in frame.columns if name == FILE), *table.keys]
    ordered = frame.sortWithinPartitions(*dict.fromkeys(order))
    return write(table.select(ordered), lake, f"{table.name}/run={run}{under}", table)


def write(frame: DataFrame, lake: Lake, folder: str, table: schemas.Table, *more: str) -> dict[str, Partition]:
    """Write the frame as it is spread, and take the checksums of its files.

    Returns its partitions. With `more` partition columns in front, their values come first in each key.
    """
    frame.write.mode("errorifexists").partitionBy(*more, *table.partitions).parquet(f"{lake.url}/{folder}")
    names = list(lake.store.sizes(folder))
    sums = lake.store.sums(names)
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = [part.partition("=") for part in name.removeprefix(folder + "/").split("/")[:-1]]
        found["/".join(unquote(value) for _, _, value in parts)].append(name)
    return {
        key: Partition(tuple(files), 0, sums=tuple(sums[file] for file in files))
        for key, files in sorted(found.items())
    }


def counted(
    spark: SparkSession, lake: Lake, table: schemas.Table, staged: Mapping[str, Partition], *, digest: bool
) -> dict[str, Partition]:
    """The staged partitions with the number of rows their files hold, and a digest of those rows: what is published
    has been read once."""
    if not staged:
        return {}
    fresh = {file for part in staged.values() for file in part.files}
    rows = load(spark, lake, table, Manifest(staged), staged, fresh)
    columns = [F.col(name) for name in table.partitions]
    sums = _digest(table) if digest else []
    result = {}
    for row in rows.groupBy(*columns).agg(F.count("*").alias("_rows"), *sums).collect():
        key = "/".join(str(row[name]) for name in table.partitions)
        words = "".join(f"{row[f'_digest{i}'] & (2**64 - 1):016x}" for i in range(len(sums)))
        text = f"{row['_rows']}-{words}" if digest else ""
        result[key] = replace(staged[key], rows=row["_rows"], digest=text)
    missing = staged.keys() - result.keys()
    if missing:
        raise RuntimeError(f"{table.name}: nothing was read back of {', '.join(sorted(missing))}")
    return result


def _digest(table: schemas.Table) -> list[Column]:
    # xxhash64 passes over nulls; which columns are null is hashed too, or (null, 1) would be (1, null).
    values = [F.col(name) for name in table.names]
    nulls = [F.col(c.name).isNull() for c in table.columns if c.optional]
    return [F.bit_xor(F.xxhash64(F.lit(seed), *values, *nulls)).alias(f"_digest{seed}") for seed in range(2)]


def to_postgres(
    spark: SparkSession,
    lake: Lake,
    dsn: str,
    table: schemas.Table,
    *,
    target: str,
    published: str,
    anew: Callable[[str], bool] = lambda key: False,
) -> tuple[int, int]:
    """Bring a mart in PostgreSQL to what the lake's is now. Returns the days and tenants changed, and rows written.
    Those for which `anew` says so are written again though nothing has changed.

    All of it in one transaction that holds the mart's lock and reads the lake's pointer under it: a run that was
    slower cannot put back what a later one has replaced, and no reader sees a day half written.
    """
    import psycopg
    from psycopg import sql

    names = [f"{name}_id" if name == "tenant" else name for name in table.names]
    into, done = sql.Identifier(target), sql.Identifier(published)
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"codeq:{target}"])
        manifest = lake.manifest(table.name)
        there = {
            f"{day}/{tenant}": source
            for day, tenant, source in connection.execute(
                sql.SQL("SELECT date, tenant_id, source FROM {} WHERE mart = %s").format(done), [table.name]
            )
        }
        stale = sorted(manifest.stale(there, anew))
        if not stale:
            return 0, 0
        days, tenants = ([key.split("/")[part] for key in stale] for part in (0, 1))
        wanted = only(load(spark, lake, table, manifest, {key.split("/")[0] for key in stale}), stale)
        for name in (into, done):
            mart = sql.SQL("") if name is into else sql.SQL("mart = {} AND").format(sql.Literal(table.name))
            connection.execute(
                sql.SQL(
                    "DELETE FROM {} USING unnest(%s::date[], %s::text[]) AS k(day, tid)"
                    " WHERE {} date = k.day AND tenant_id = k.tid"
                ).format(name, mart),
                [days, tenants],
            )
        count = _copy(connection, wanted, into, names)
        with connection.cursor().copy(
            sql.SQL("COPY {} (mart, date, tenant_id, source) FROM STDIN").format(done)
        ) as copy:
            for key in stale:
                if key in manifest.sources:
                    copy.write_row((table.name, *key.split("/"), manifest.sources[key]))
        return len(stale), count


def _copy(connection: Any, frame: DataFrame, into: Any, names: list[str]) -> int:
    from psycopg import sql
    from pyarrow import csv

    rows = frame.toArrow()
    columns = sql.SQL(", ").join(sql.Identifier(name) for name in names)
    with connection.cursor().copy(sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(into, columns)) as copy:
        for batch in rows.to_batches(max_chunksize=50_000):
            text = io.BytesIO()
            csv.write_csv(batch, text, csv.WriteOptions(include_header=False, quoting_style="needed"))
            copy.write(text.getvalue())
    return int(rows.num_rows)
