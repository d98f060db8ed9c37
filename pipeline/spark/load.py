"""Load a dataset as tasks.

The executors send the rows through the batch API. Each row becomes one task, even if the load is repeated.

The rows are staged once, in buckets by their key, so that a resumed load sends the rows that it started with. An
accepted bucket is recorded. An interrupted bucket is sent again, and the API recognises its rows by their idempotency
keys.
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

from pipeline.spark.lake import Lake, new_run_id

FORMATS = {
    "parquet": ("parquet",),
    "csv": ("csv", "csv.gz", "tsv"),
    "json": ("json", "jsonl", "ndjson", "json.gz", "jsonl.gz"),
}
TABLE_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,2}"
ROWS_PER_BUCKET = 5_000
BUCKETS_PER_WAVE = 16
GIVE_UP_SECONDS = 300.0
RESULT_SCHEMA = "bucket long, sent long, refused long, reason string"


class LoadRejected(RuntimeError):
    """The API rejected a request, or did not accept it within GIVE_UP_SECONDS."""


@dataclass(frozen=True)
class LoadTarget:
    """The queue and API that the tasks are sent to. `token` is a producer token."""

    url: str
    token: str = field(repr=False)
    command: str
    priority: int = 0
    batch: int = 100


@dataclass(frozen=True)
class LoadResult:
    """The result of a load.

    `quarantined` rows could not be read or had no key, and were not sent.
    """

    rows: int
    sent: int
    refused: int
    quarantined: int
    seconds: float
    reasons: tuple[str, ...] = ()
    resumed: bool = False


def read_dataset(spark: SparkSession, source: str, kind: str = "") -> DataFrame:
    """Return the dataset's columns and `payload`, the row as JSON text.

    `payload` is null if the row could not be read. A JSON line is used as the payload without any change, so that
    numbers keep all their digits.
    """
    if not kind and re.fullmatch(TABLE_NAME, source) and spark.catalog.tableExists(source):
        return _add_payload(spark.table(source))
    name = source.rstrip("/").lower()
    kind = kind or next(
        (k for k, suffixes in FORMATS.items() if name.endswith(tuple(f".{s}" for s in suffixes))), "parquet"
    )
    if kind == "json":
        lines = spark.read.text(source).where(F.trim("value") != "")
        is_valid = F.try_parse_json("value").isNotNull()
        return lines.select(F.when(is_valid, F.col("value")).alias("payload"), F.col("value").alias("_line"))
    if kind == "csv":
        separator = "\t" if name.endswith("tsv") else ","
        options = {"header": "true", "sep": separator, "multiLine": "true", "escape": '"'}
        columns = spark.read.options(**options).csv(source).columns
        struct = ", ".join(f"`{column}` string" for column in columns) + ", _corrupt string"
        rows = spark.read.options(**options, columnNameOfCorruptRecord="_corrupt").schema(struct).csv(source)
        payload = F.to_json(F.struct(*(F.col(f"`{c}`") for c in columns)), {"ignoreNullFields": "false"})
        return rows.withColumn("payload", F.when(F.col("_corrupt").isNull(), payload))
    return _add_payload(spark.read.format(kind).load(source))


def _add_payload(rows: DataFrame) -> DataFrame:
    columns = F.struct(*(F.col(f"`{name}`") for name in rows.columns))
    return rows.withColumn("payload", F.to_json(columns, {"ignoreNullFields": "false"}))


def add_idempotency_keys(rows: DataFrame, command: str, key: str) -> DataFrame:
    """Return `payload` and `idempotency_key` of each row.

    The key is null if the row cannot be sent. Without a key column, the key is computed from the row's content and the
    number of equal rows before it. So the same dataset gives the same keys in any order of rows.
    """
    if key:
        value: Column = (
            F.get_json_object("payload", f"$['{key}']") if "_line" in rows.columns else F.col(f"`{key}`").cast("string")
        )
        with_key = rows.withColumn("_key", value)
    else:
        equal_rows = Window.partitionBy("payload").orderBy(F.lit(0))
        with_key = rows.withColumn("_key", F.concat_ws(" ", F.row_number().over(equal_rows).cast("string"), "payload"))
    hashed = F.sha2(F.concat(F.lit(f"{command}\n"), F.col("_key")), 256)
    usable = F.col("payload").isNotNull() & F.col("_key").isNotNull()
    return with_key.select("payload", F.when(usable, F.concat(F.lit("load-"), hashed)).alias("idempotency_key"))


def load(
    spark: SparkSession,
    lake: Lake,
    source: str,
    target: LoadTarget,
    *,
    key: str = "",
    kind: str = "",
    again: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadResult:
    """Send every row of `source` as a task.

    A call with the same arguments as an interrupted one resumes it. `again`, any word, starts a separate load, whose
    rows become new tasks.
    """
    started = time.monotonic()
    names = (source, target.url, target.command, str(target.priority), key, kind, again)
    folder = f"_loads/{hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:16]}"
    plan, resumed = _plan_load(spark, lake, folder, read_dataset(spark, source, kind), target, key, again)
    done = {
        int(name.removesuffix(".json")): _read_result(lake, folder, name)
        for name in lake.store.list_names(f"{folder}/done")
    }
    remaining = [bucket for bucket in plan["buckets"] if bucket not in done]
    on_progress(sum(result["sent"] for result in done.values()), plan["rows"])
    for start in range(0, len(remaining), BUCKETS_PER_WAVE):
        wave = remaining[start : start + BUCKETS_PER_WAVE]
        for result in _send_wave(spark, lake, folder, wave, target):
            done[result["bucket"]] = result
            lake.store.put_new(f"{folder}/done/{result['bucket']}.json", json.dumps(result).encode())
        on_progress(sum(result["sent"] for result in done.values()), plan["rows"])
    lake.store.delete(f"{folder}/rows")
    return LoadResult(
        plan["rows"],
        sum(result["sent"] for result in done.values()),
        sum(result["refused"] for result in done.values()),
        plan["quarantined"],
        round(time.monotonic() - started, 3),
        tuple(sorted({result["reason"] for result in done.values() if result["reason"]}))[:10],
        resumed,
    )


def _read_result(lake: Lake, folder: str, name: str) -> Any:
    return json.loads(lake.store.read(f"{folder}/done/{name}") or b"{}")


def _plan_load(
    spark: SparkSession, lake: Lake, folder: str, rows: DataFrame, target: LoadTarget, key: str, again: str
) -> tuple[Any, bool]:
    saved_plan = lake.store.read(f"{folder}/plan.json")
    if saved_plan:
        return json.loads(saved_plan), True
    lake.store.delete(f"{folder}/rows")
    lake.store.delete(f"{folder}/begun")
    lake.store.put_new(f"{folder}/begun", new_run_id().encode())
    keyed_rows = add_idempotency_keys(rows, f"{target.command}\n{again}" if again else target.command, key)
    total = keyed_rows.count()
    buckets = max(1, -(-total // ROWS_PER_BUCKET))
    bucket = F.when(F.col("idempotency_key").isNull(), -1).otherwise(
        F.pmod(F.xxhash64("idempotency_key"), F.lit(buckets))
    )
    staged = keyed_rows.withColumn("bucket", bucket).repartition("bucket")
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
    spark: SparkSession, lake: Lake, folder: str, wave: list[int], target: LoadTarget
) -> Iterator[dict[str, Any]]:
    base = f"{lake.url}/{folder}/rows"
    rows = (
        spark.read.schema("payload string, idempotency_key string, bucket long")
        .option("basePath", base)
        .parquet(*(f"{base}/bucket={bucket}" for bucket in wave))
    )
    distributed = rows.repartition(spark.sparkContext.defaultParallelism, "bucket")

    def send(batches: Iterator[Any]) -> Iterator[Any]:
        return _send(batches, target)

    sums = distributed.mapInArrow(send, RESULT_SCHEMA).groupBy("bucket")
    for row in sums.agg(
        F.sum("sent").alias("sent"), F.sum("refused").alias("refused"), F.max("reason").alias("reason")
    ).collect():
        yield row.asDict()


def _send(batches: Iterator[Any], target: LoadTarget) -> Iterator[Any]:
    """Send the rows of some buckets, `target.batch` rows per request. This runs on an executor."""
    import pyarrow as pa

    connection = _Connection(target)
    command = json.dumps(target.command)
    names = ["bucket", "sent", "refused", "reason"]
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ("payload", "idempotency_key", "bucket")]
        rows = list(zip(*columns, strict=True))
        results = []
        for start in range(0, len(rows), target.batch):
            chunk = rows[start : start + target.batch]
            # The payload is JSON already. Concatenating it keeps every digit, which parsing would not.
            body = ",".join(
                f'{{"command":{command},"priority":{target.priority},"idempotencyKey":"{key}","payload":{payload}}}'
                for payload, key, _ in chunk
            )
            items = connection.post(f'{{"tasks":[{body}]}}'.encode())
            for (_, _, bucket), item in zip(chunk, items, strict=True):
                is_refused = "error" in item
                results.append((bucket, not is_refused, is_refused, _get_reason(item) if is_refused else ""))
        yield pa.RecordBatch.from_pydict(
            {
                name: pa.array([row[i] if name in ("bucket", "reason") else int(row[i]) for row in results], kind)
                for i, (name, kind) in enumerate(
                    zip(names, (pa.int64(), pa.int64(), pa.int64(), pa.string()), strict=True)
                )
            }
        )


def _get_reason(item: Any) -> str:
    error = item["error"]
    return str(error.get("detail") or error.get("code") or error)[:200] if isinstance(error, dict) else str(error)[:200]


class _Connection:
    """A keep-alive connection to the API, reopened when it breaks.

    Every request may be repeated, because each task has an idempotency key.
    """

    def __init__(self, target: LoadTarget) -> None:
        self.target = target
        self.parts = urlsplit(target.url)
        self.connection: Any = None

    def post(self, body: bytes) -> list[Any]:
        """Return the results of a batch, in its order.

        Retry while the API is unreachable or asks to retry later. Raise LoadRejected if it rejects the request,
        or has not accepted it after GIVE_UP_SECONDS.
        """
        import http.client

        deadline = time.monotonic() + GIVE_UP_SECONDS
        delay_seconds = 0.2
        while True:
            try:
                status, headers, response = self._request(body)
            except (OSError, http.client.HTTPException) as error:
                self.connection = None
                status, headers, response = 0, {}, str(error).encode()
            if status == 200:
                return list(json.loads(response)["results"])
            if status not in (0, 429, 500, 502, 503, 504) or time.monotonic() > deadline:
                raise LoadRejected(f"{status or 'no response'}: {response[:500].decode(errors='replace')}")
            with contextlib.suppress(ValueError):  # Retry-After may be a date; then use the current delay
                delay_seconds = max(delay_seconds, min(float(headers.get("Retry-After", 0)), 60.0))
            time.sleep(delay_seconds)
            delay_seconds = min(2 * delay_seconds, 5.0)

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
