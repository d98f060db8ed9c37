"""History from files that somebody else wrote, Parquet or JSON lines: each is held to the contract."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType, TimestampType

from pipeline.spark import schemas
from pipeline.spark.store import open_store


def read(spark: SparkSession, url: str, contract: schemas.Table) -> tuple[DataFrame, list[str]]:
    """The rows of a lake's Parquet or JSON-lines files, and the files left out with the reason for each.

    A file that cannot be read, or does not keep the contract, is left out whole; the others are read in full. Every
    file is read once here, because a torn page shows only when it is reached.
    """
    good: dict[str, list[str]] = {"parquet": [], "json": []}
    left_out = []
    for path in _listed(spark, url):
        kind = "json" if path.endswith((".json", ".jsonl", ".json.gz")) else "parquet"
        try:
            _probe(spark, path, kind, contract)
        except Exception as error:  # noqa: BLE001  # whatever a reader throws at a broken file, the file is the reason
            left_out.append(f"{path}: {_first_line(error)}")
        else:
            good[kind].append(path)
    frames = [spark.createDataFrame([], contract.struct)]
    frames += [contract.select(_open(spark, [path], "parquet", contract)) for path in good["parquet"]]
    if good["json"]:
        frames.append(contract.select(_open(spark, good["json"], "json", contract)))
    result = frames[0]
    for frame in frames[1:]:
        result = result.unionByName(frame)
    return result, left_out


def _listed(spark: SparkSession, url: str) -> list[str]:
    store = open_store(url, spark)
    return [f"{store.url}/{name}" for name in store.sizes("") if not name.endswith(".crc")]


def _open(spark: SparkSession, paths: list[str], kind: str, contract: schemas.Table) -> DataFrame:
    if kind == "json":
        strict = spark.read.option("mode", "FAILFAST").option("timestampFormat", "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]XXX")
        return strict.schema(contract.struct).json(paths)
    frame = spark.read.parquet(*paths)
    for column in contract.columns:
        if column.optional and column.name not in frame.columns:
            frame = frame.withColumn(column.name, F.lit(None).cast(schemas.TYPES[column.type]))
    return frame


def _probe(spark: SparkSession, path: str, kind: str, contract: schemas.Table) -> None:
    if kind == "json":
        schemas.check(contract, _json_schema(spark, path, contract), path)
        _open(spark, [path], kind, contract).write.format("noop").mode("overwrite").save()
    else:
        found = spark.read.parquet(path)
        schemas.check(contract, found.schema, path)
        found.write.format("noop").mode("overwrite").save()


def _json_schema(spark: SparkSession, path: str, contract: schemas.Table) -> StructType:
    """The file's columns as JSON has them: a number is a long and a time is text, which the contract then reads."""
    found = spark.read.option("mode", "FAILFAST").json(path).schema
    wanted = {column.name: column for column in contract.columns}
    kept = StructType()
    for field in found.fields:
        kind = schemas.TYPES[wanted[field.name].type] if field.name in wanted else field.dataType
        fits = (isinstance(kind, TimestampType) and field.dataType.simpleString() == "string") or (
            field.dataType == LongType() and kind.simpleString() in ("int", "bigint")
        )
        kept.add(field.name, kind if fits else field.dataType)
    return kept


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
