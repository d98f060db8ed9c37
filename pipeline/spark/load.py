"""A dataset to tasks: from the executors through the batch API, each row once however often the load is repeated.

The rows are staged once, in buckets by their key, so that a load that is resumed sends what it began with. A bucket
that has been accepted is noted; one that was interrupted is sent again, and the API knows the rows by their keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from pipeline.spark.lake import Lake, new_run

FORMATS = {
    "parquet": ("parquet",),
    "csv": ("csv", "csv.gz", "tsv"),
    "json": ("json", "jsonl", "ndjson", "json.gz", "jsonl.gz"),
}
TABLE_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,2}"
ROWS_PER_BUCKET = 5_000
BUCKETS_PER_WAVE = 16
GIVE_UP_SECONDS = 300.0
RESULT = "bucket long, sent long, refused long, reason string"


class Refused(RuntimeError):
    """The API refuses the load as a whole."""


@dataclass(frozen=True)
class Target:
    """Where the tasks go. `token` is a producer's."""

    url: str
    token: str = field(repr=False)
    command: str
    priority: int = 0
    batch: int = 100


@dataclass(frozen=True)
class Loaded:
    """What came of a load. `quarantined` rows could not be read or had no key, and were not sent."""

    rows: int
    sent: int
    refused: int
    quarantined: int
    seconds: float
    reasons: tuple[str, ...] = ()
    resumed: bool = False


def read(spark: SparkSession, source: str, kind: str = "") -> DataFrame:
    """The dataset as `payload` (JSON text) and its columns; `payload` is null where the row could not be read.

    A JSON line is the payload as it stands, to the last digit.
    """
    if not kind and re.fullmatch(TABLE_NAME, source) and spark.catalog.tableExists(source):
        return _with_payload(spark.table(source))
    name = source.rstrip("/").lower()
    kind = kind or next((k for k, ends in FORMATS.items() if name.endswith(tuple(f".{e}" for e in ends))), "parquet")
    if kind == "json":
        lines = spark.read.text(source).where(F.trim("value") != "")
        good = F.try_parse_json("value").isNotNull()
        return lines.select(F.when(good, F.col("value")).alias("payload"), F.col("value").alias("_line"))
    if kind == "csv":
        separator = "\t" if name.endswith("tsv") else ","
        options = {"header": "true", "sep": separator, "multiLine": "true", "escape": '"'}
        columns = spark.read.options(**options).csv(source).columns
        struct = ", ".join(f"`{column}` string" for column in columns) + ", _corrupt string"
        rows = spark.read.options(**options, columnNameOfCorruptRecord="_corrupt").schema(struct).csv(source)
        payload = F.to_json(F.struct(*(F.col(f"`{c}`") for c in columns)), {"ignoreNullFields": "false"})
        return rows.withColumn("payload", F.when(F.col("_corrupt").isNull(), payload))
    return _with_payload(spark.read.format(kind).load(source))


def _with_payload(rows: DataFrame) -> DataFrame:
    columns = F.struct(*(F.col(f"`{name}`") for name in rows.columns))
    return rows.withColumn("payload", F.to_json(columns, {"ignoreNullFields": "false"}))


def keyed(rows: DataFrame, command: str, key: str) -> DataFrame:
    """`payload` and `idempotency_key` of each row; a null key where it cannot be sent.

    Without a key column a row is known by its content and by how many like it came before: whatever order the rows
    are read in, the same dataset makes the same keys.
    """
    if key:
        said: Column = (
            F.get_json_object("payload", f"$['{key}']") if "_line" in rows.columns else F.col(f"`{key}`").cast("string")
        )
        named = rows.withColumn("_key", said)
    else:
        alike = Window.partitionBy("payload").orderBy(F.lit(0))
        named = rows.withColumn("_key", F.concat_ws(" ", F.row_number().over(alike).cast("string"), "payload"))
    hashed = F.sha2(F.concat(F.lit(f"{command}\n"), F.col("_key")), 256)
    usable = F.col("payload").isNotNull() & F.col("_key").isNotNull()
    return named.select("payload", F.when(usable, F.concat(F.lit("load-"), hashed)).alias("idempotency_key"))


def load(
    spark: SparkSession,
    lake: Lake,
    source: str,
    target: Target,
    *,
    key: str = "",
    kind: str = "",
    again: str = "",
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Loaded:
    """Send every row of `source` as a task. Resumes what an earlier call with the same arguments began; `again` (any
    word) makes it another load, whose rows are tasks of their own."""
    began = time.monotonic()
    names = (source, target.url, target.command, str(target.priority), key, kind, again)
    folder = f"_loads/{hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:16]}"
    plan, resumed = _plan(spark, lake, folder, read(spark, source, kind), target, key, again)
    done = {int(name.removesuffix(".json")): _result(lake, folder, name) for name in lake.store.names(f"{folder}/done")}
    left = [bucket for bucket in plan["buckets"] if bucket not in done]
    told(sum(result["sent"] for result in done.values()), plan["rows"])
    for at in range(0, len(left), BUCKETS_PER_WAVE):
        wave = left[at : at + BUCKETS_PER_WAVE]
        for result in _send_wave(spark, lake, folder, wave, target):
            done[result["bucket"]] = result
            lake.store.put_new(f"{folder}/done/{result['bucket']}.json", json.dumps(result).encode())
        told(sum(result["sent"] for result in done.values()), plan["rows"])
    lake.store.delete(f"{folder}/rows")
    return Loaded(
        plan["rows"],
        sum(result["sent"] for result in done.values()),
        sum(result["refused"] for result in done.values()),
        plan["quarantined"],
        round(time.monotonic() - began, 3),
        tuple(sorted({result["reason"] for result in done.values() if result["reason"]}))[:10],
        resumed,
    )


def _result(lake: Lake, folder: str, name: str) -> Any:
    return json.loads(lake.store.read(f"{folder}/done/{name}") or b"{}")


def _plan(
    spark: SparkSession, lake: Lake, folder: str, rows: DataFrame, target: Target, key: str, again: str
) -> tuple[Any, bool]:
    known = lake.store.read(f"{folder}/plan.json")
    if known:
        return json.loads(known), True
    lake.store.delete(f"{folder}/rows")
    lake.store.delete(f"{folder}/begun")
    lake.store.put_new(f"{folder}/begun", new_run().encode())
    salted = keyed(rows, f"{target.command}\n{again}" if again else target.command, key)
    total = salted.count()
    buckets = max(1, -(-total // ROWS_PER_BUCKET))
    bucket = F.when(F.col("idempotency_key").isNull(), -1).otherwise(
        F.pmod(F.xxhash64("idempotency_key"), F.lit(buckets))
    )
    staged = salted.withColumn("bucket", bucket).repartition("bucket")
    staged.write.mode("overwrite").partitionBy("bucket").parquet(f"{lake.url}/{folder}/rows")
    counts = (
        {
            row["bucket"]: row["count"]
            for row in spark.read.parquet(f"{lake.url}/{folder}/rows").groupBy("bucket").count().collect()
        }
        if total
        else {}
    )
    plan = {
        "rows": sum(count for number, count in counts.items() if number >= 0),
        "quarantined": counts.get(-1, 0),
        "buckets": sorted(number for number in counts if number >= 0),
    }
    lake.store.put_new(f"{folder}/plan.json", json.dumps(plan).encode())
    return plan, False


def _send_wave(
    spark: SparkSession, lake: Lake, folder: str, wave: list[int], target: Target
) -> Iterator[dict[str, Any]]:
    base = f"{lake.url}/{folder}/rows"
    rows = (
        spark.read.schema("payload string, idempotency_key string, bucket long")
        .option("basePath", base)
        .parquet(*(f"{base}/bucket={bucket}" for bucket in wave))
    )
    spread = rows.repartition(spark.sparkContext.defaultParallelism, "bucket")

    def send(batches: Iterator[Any]) -> Iterator[Any]:
        return _send(batches, target)

    sums = spread.mapInArrow(send, RESULT).groupBy("bucket")
    for row in sums.agg(
        F.sum("sent").alias("sent"), F.sum("refused").alias("refused"), F.max("reason").alias("reason")
    ).collect():
        yield row.asDict()


def _send(batches: Iterator[Any], target: Target) -> Iterator[Any]:
    """Runs on an executor: the rows of its buckets, a request for each `target.batch` of them."""
    import pyarrow as pa

    connection = _Connection(target)
    command = json.dumps(target.command)
    names = ["bucket", "sent", "refused", "reason"]
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ("payload", "idempotency_key", "bucket")]
        rows = list(zip(*columns, strict=True))
        results = []
        for at in range(0, len(rows), target.batch):
            chunk = rows[at : at + target.batch]
            # The payload is JSON already: put together by hand, no digit of it is touched.
            body = ",".join(
                f'{{"command":{command},"priority":{target.priority},"idempotencyKey":"{key}","payload":{payload}}}'
                for payload, key, _ in chunk
            )
            answers = connection.post(f'{{"tasks":[{body}]}}'.encode())
            for (_, _, bucket), answer in zip(chunk, answers, strict=True):
                refused = "error" in answer
                results.append((bucket, not refused, refused, _reason(answer) if refused else ""))
        yield pa.RecordBatch.from_pydict(
            {
                name: pa.array([row[i] if name in ("bucket", "reason") else int(row[i]) for row in results], kind)
                for i, (name, kind) in enumerate(
                    zip(names, (pa.int64(), pa.int64(), pa.int64(), pa.string()), strict=True)
                )
            }
        )


def _reason(answer: Any) -> str:
    error = answer["error"]
    return str(error.get("detail") or error.get("code") or error)[:200] if isinstance(error, dict) else str(error)[:200]


class _Connection:
    """One keep-alive connection to the API, made again when it breaks: every request may be repeated."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.parts = urlsplit(target.url)
        self.connection: Any = None

    def post(self, body: bytes) -> list[Any]:
        """The answers to a batch, in its order. Waits while the API is away or says so; Refused where it says no."""
        import http.client

        deadline = time.monotonic() + GIVE_UP_SECONDS
        pause = 0.2
        while True:
            try:
                status, headers, answer = self._request(body)
            except (OSError, http.client.HTTPException) as error:
                self.connection = None
                status, headers, answer = 0, {}, str(error).encode()
            if status == 200:
                return list(json.loads(answer)["results"])
            if status not in (0, 429, 500, 502, 503, 504) or time.monotonic() > deadline:
                raise Refused(f"{status or 'no answer'}: {answer[:500].decode(errors='replace')}")
            with contextlib.suppress(ValueError):  # Retry-After may be a date: then our own pause will do
                pause = max(pause, min(float(headers.get("Retry-After", 0)), 60.0))
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _request(self, body: bytes) -> tuple[int, Any, bytes]:
        import http.client

        if self.connection is None:
            secure = self.parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            self.connection = kind(self.parts.hostname or "", self.parts.port, timeout=60)
        self.connection.request(
            "POST",
            f"{self.parts.path.rstrip('/')}/v1/codeq/tasks/batch",
            body,
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.target.token}"},
        )
        response = self.connection.getresponse()
        return response.status, response.headers, response.read()
