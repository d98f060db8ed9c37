"""Write partitions of the lake and the marts in PostgreSQL.

Both writes can be repeated. Partitions are staged under the name of the run, and readers see only published runs. In
PostgreSQL, the rows of a day and tenant that are up to date are not written again.
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
from pipeline.spark.transforms.common import FILE_COLUMN

ROWS_PER_FILE = 1_000_000


def load(
    spark: SparkSession,
    lake: Lake,
    table: schemas.TableContract,
    manifest: Manifest,
    keys: Iterable[str],
    verified_files: set[str] | None = None,
) -> DataFrame:
    """Return the rows of these partitions. Partitions that do not exist have no rows.

    Raises DamagedFile if a file differs from its checksum. Files in `verified_files` are not checked again.
    """
    existing = [key for key in keys if key in manifest.partitions]
    lake.verify(manifest, existing, verified_files)
    paths = lake.paths(manifest, existing)
    if not paths:
        return spark.createDataFrame([], table.struct)
    base = f"{lake.url}/{paths[0].removeprefix(lake.url + '/').split('/')[0]}"
    return spark.read.schema(table.struct).option("basePath", base).parquet(*paths).select(table.names)


def filter_keys(frame: DataFrame, keys: Iterable[str], *, exclude: bool = False) -> DataFrame:
    """Return the rows of these days and tenants or, with `exclude`, all other rows."""
    has_key = F.concat_ws("/", F.col("date").cast("string"), "tenant").isin(sorted(keys))
    return frame.where(~has_key if exclude else has_key)


def check_files(
    spark: SparkSession, lake: Lake, table: schemas.TableContract, manifest: Manifest, keys: Iterable[str]
) -> None:
    """Check one file of each run that wrote these partitions against the current contract."""
    runs: dict[str, str] = {}
    for key in keys:
        for file in manifest.partitions[key].files:
            runs.setdefault(file.split("/date=")[0], file)
    for file in runs.values():
        schema = spark.read.parquet(f"{lake.url}/{file}").schema
        schemas.check(table, schema, file, ignore=(*table.partitions, "reason"))


def distribute(frame: DataFrame, table: schemas.TableContract, rows: Mapping[str, int]) -> DataFrame:
    """Repartition the frame so that one Spark task holds the rows of a partition of this table.

    `rows` is the approximate number of rows of each partition. A large partition is divided into several files:
    `FILE_COLUMN` is the number of the file that a row is written to.
    """
    file_counts = {key: -(-count // ROWS_PER_FILE) for key, count in rows.items() if count > ROWS_PER_FILE}
    if not file_counts:
        return frame.repartition(*table.partitions)
    file: Column = F.lit(0).cast("bigint")
    for key, files in sorted(file_counts.items()):
        in_partition = F.lit(True)
        for name, value in zip(table.partitions, key.split("/"), strict=True):
            in_partition = in_partition & (F.col(name) == F.lit(value))
        file = F.when(in_partition, F.pmod(F.xxhash64(*table.keys), F.lit(files))).otherwise(file)
    return frame.withColumn(FILE_COLUMN, file).repartition(*table.partitions, FILE_COLUMN)


def stage(
    frame: DataFrame, lake: Lake, table: schemas.TableContract, run: str, subfolder: str = ""
) -> dict[str, Partition]:
    """Write a frame from `distribute` as partitions of this table.

    The rows of each file are sorted by the table's keys, so that equal rows give equal files. `subfolder` is a folder
    inside the run's folder.
    """
    order = [*table.partitions, *(name for name in frame.columns if name == FILE_COLUMN), *table.keys]
    ordered = frame.sortWithinPartitions(*dict.fromkeys(order))
    return write(table.select(ordered), lake, f"{table.name}/run={run}{subfolder}", table)


def write(
    frame: DataFrame, lake: Lake, folder: str, table: schemas.TableContract, *prefix: str
) -> dict[str, Partition]:
    """Write the frame as it is distributed, and return its partitions with checksums.

    `prefix` names partition columns that come before those of the table, on disk and in the keys.
    """
    frame.write.mode("errorifexists").partitionBy(*prefix, *table.partitions).parquet(f"{lake.url}/{folder}")
    names = list(lake.store.list_sizes(folder))
    sums = lake.store.compute_checksums(names)
    files_by_key: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = [part.partition("=") for part in name.removeprefix(folder + "/").split("/")[:-1]]
        files_by_key["/".join(unquote(value) for _, _, value in parts)].append(name)
    return {
        key: Partition(tuple(files), 0, sums=tuple(sums[file] for file in files))
        for key, files in sorted(files_by_key.items())
    }


def count_rows(
    spark: SparkSession, lake: Lake, table: schemas.TableContract, staged: Mapping[str, Partition], *, digest: bool
) -> dict[str, Partition]:
    """Return the staged partitions with their row counts and, with `digest`, row digests.

    This reads every file once, so that only readable files are published.
    """
    if not staged:
        return {}
    new_files = {file for part in staged.values() for file in part.files}
    rows = load(spark, lake, table, Manifest(staged), staged, new_files)
    columns = [F.col(name) for name in table.partitions]
    sums = _build_digest(table) if digest else []
    result = {}
    for row in rows.groupBy(*columns).agg(F.count("*").alias("_rows"), *sums).collect():
        key = "/".join(str(row[name]) for name in table.partitions)
        words = "".join(f"{row[f'_digest{i}'] & (2**64 - 1):016x}" for i in range(len(sums)))
        text = f"{row['_rows']}-{words}" if digest else ""
        result[key] = replace(staged[key], rows=row["_rows"], digest=text)
    missing = staged.keys() - result.keys()
    if missing:
        raise RuntimeError(f"{table.name}: no rows could be read back from {', '.join(sorted(missing))}")
    return result


def _build_digest(table: schemas.TableContract) -> list[Column]:
    # xxhash64 skips nulls, so hash the null flags too: otherwise (null, 1) and (1, null) would have one digest.
    values = [F.col(name) for name in table.names]
    nulls = [F.col(c.name).isNull() for c in table.columns if c.optional]
    return [F.bit_xor(F.xxhash64(F.lit(seed), *values, *nulls)).alias(f"_digest{seed}") for seed in range(2)]


def publish_mart(
    spark: SparkSession,
    lake: Lake,
    dsn: str,
    table: schemas.TableContract,
    *,
    target: str,
    published: str,
    must_rewrite: Callable[[str], bool] = lambda key: False,
) -> tuple[int, int]:
    """Update a mart in PostgreSQL to the lake's current version.

    Return the numbers of changed keys and written rows. A key is a day and tenant. Keys for which `must_rewrite` is
    true are written even if nothing has changed.

    The update is one transaction, which reads the lake's pointer while it holds the mart's lock. So a slower run
    cannot replace the rows of a later run, and readers never see a partial update.
    """
    import psycopg
    from psycopg import sql

    names = [f"{name}_id" if name == "tenant" else name for name in table.names]
    mart_table, published_table = sql.Identifier(target), sql.Identifier(published)
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"codeq:{target}"])
        manifest = lake.manifest(table.name)
        published_sources = {
            f"{day}/{tenant}": source
            for day, tenant, source in connection.execute(
                sql.SQL("SELECT date, tenant_id, source FROM {} WHERE mart = %s").format(published_table), [table.name]
            )
        }
        stale = sorted(manifest.find_stale_keys(published_sources, must_rewrite))
        if not stale:
            return 0, 0
        days, tenants = ([key.split("/")[part] for key in stale] for part in (0, 1))
        rows = filter_keys(load(spark, lake, table, manifest, {key.split("/")[0] for key in stale}), stale)
        for name in (mart_table, published_table):
            condition = sql.SQL("") if name is mart_table else sql.SQL("mart = {} AND").format(sql.Literal(table.name))
            connection.execute(
                sql.SQL(
                    "DELETE FROM {} USING unnest(%s::date[], %s::text[]) AS k(day, tid)"
                    " WHERE {} date = k.day AND tenant_id = k.tid"
                ).format(name, condition),
                [days, tenants],
            )
        count = _copy(connection, rows, mart_table, names)
        with connection.cursor().copy(
            sql.SQL("COPY {} (mart, date, tenant_id, source) FROM STDIN").format(published_table)
        ) as copy:
            for key in stale:
                if key in manifest.sources:
                    copy.write_row((table.name, *key.split("/"), manifest.sources[key]))
        return len(stale), count


def _copy(connection: Any, frame: DataFrame, mart_table: Any, names: list[str]) -> int:
    from psycopg import sql
    from pyarrow import csv

    rows = frame.toArrow()
    columns = sql.SQL(", ").join(sql.Identifier(name) for name in names)
    with connection.cursor().copy(sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(mart_table, columns)) as copy:
        for batch in rows.to_batches(max_chunksize=50_000):
            text = io.BytesIO()
            csv.write_csv(batch, text, csv.WriteOptions(include_header=False, quoting_style="needed"))
            copy.write(text.getvalue())
    return int(rows.num_rows)
