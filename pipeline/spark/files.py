"""Read history from external Parquet or JSON-lines files that conform to the contract."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType, TimestampType

from pipeline.spark import schemas
from pipeline.spark.store import open_store


def read(spark: SparkSession, url: str, contract: schemas.TableContract) -> tuple[DataFrame, list[str]]:
    """Return the rows of the Parquet and JSON-lines files, and the reasons for excluded files.

    A file that cannot be read or breaks its contract is excluded as a whole. Every file is read once completely
    before it is used, because a damaged page is only detected when it is read.
    """
    valid: dict[str, list[str]] = {"parquet": [], "json": []}
    excluded = []
    for path in _list_files(spark, url):
        kind = "json" if path.endswith((".json", ".jsonl", ".json.gz")) else "parquet"
        try:
            _check_file(spark, path, kind, contract)
        except Exception as error:  # noqa: BLE001  # readers raise many kinds of errors for a broken file
            excluded.append(f"{path}: {_get_first_line(error)}")
        else:
            valid[kind].append(path)
    frames = [spark.createDataFrame([], contract.struct)]
    frames += [contract.select(_open(spark, [path], "parquet", contract)) for path in valid["parquet"]]
    if valid["json"]:
        frames.append(contract.select(_open(spark, valid["json"], "json", contract)))
    result = frames[0]
    for frame in frames[1:]:
        result = result.unionByName(frame)
    return result, excluded


def _list_files(spark: SparkSession, url: str) -> list[str]:
    store = open_store(url, spark)
    return [f"{store.url}/{name}" for name in store.list_sizes("") if not name.endswith(".crc")]


def _open(spark: SparkSession, paths: list[str], kind: str, contract: schemas.TableContract) -> DataFrame:
    if kind == "json":
        strict = spark.read.option("mode", "FAILFAST").option("timestampFormat", "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]XXX")
        return strict.schema(contract.struct).json(paths)
    frame = spark.read.parquet(*paths)
    for column in contract.columns:
        if column.optional and column.name not in frame.columns:
            frame = frame.withColumn(column.name, F.lit(None).cast(schemas.TYPES[column.type]))
    return frame


def _check_file(spark: SparkSession, path: str, kind: str, contract: schemas.TableContract) -> None:
    if kind == "json":
        schemas.check(contract, _infer_json_schema(spark, path, contract), path)
        _open(spark, [path], kind, contract).write.format("noop").mode("overwrite").save()
    else:
        frame = spark.read.parquet(path)
        schemas.check(contract, frame.schema, path)
        frame.write.format("noop").mode("overwrite").save()


def _infer_json_schema(spark: SparkSession, path: str, contract: schemas.TableContract) -> StructType:
    """Return the file's schema, with the contract's type where JSON has no such type.

    Spark infers a long for every integer and a string for a time.
    """
    schema = spark.read.option("mode", "FAILFAST").json(path).schema
    contract_columns = {column.name: column for column in contract.columns}
    result = StructType()
    for field in schema.fields:
        kind = schemas.TYPES[contract_columns[field.name].type] if field.name in contract_columns else field.dataType
        is_compatible = (isinstance(kind, TimestampType) and field.dataType.simpleString() == "string") or (
            field.dataType == LongType() and kind.simpleString() in ("int", "bigint")
        )
        result.add(field.name, kind if is_compatible else field.dataType)
    return result


def _get_first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
