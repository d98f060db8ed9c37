"""Generate synthetic history with realistic proportions.

Tests, benchmarks and demonstrations of the charts use it.

Every value is a hash of the seed and the row's number, so the same seed gives the same rows on any cluster. A few
tenants have most of the tasks, the load varies over the day and has bursts, commands differ in run time and failure
rate, failures are retried, and some rows reach the audit late.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from datetime import UTC, date, datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.spark import schemas

MAX_ATTEMPTS = 5
SIGMA = 0.8  # of the lognormal distribution of run times
# (command, mean run time in seconds, share of attempts that fail)
COMMANDS = (
    ("send-email", 0.4, 0.03),
    ("resize-image", 2.5, 0.02),
    ("render-report", 20.0, 0.06),
    ("sync-crm", 6.0, 0.12),
    ("transcode", 90.0, 0.04),
)
# Relative number of tasks in each hour of the day (UTC).
RHYTHM = (1, 1, 1, 1, 1, 2, 3, 5, 8, 10, 10, 9, 8, 9, 10, 9, 8, 6, 5, 4, 3, 3, 2, 1)
ERRORS = (
    "TimeoutError: no answer from {ip}:8443 in {n} ms",
    "HTTP 503 from https://partner.example/orders/{n}",
    "HTTP 404 from https://partner.example/orders/{n}",
    "KeyError: 'customer' in record {uuid}",
    "connection reset by {ip}",
    "disk quota exceeded: /data/work/{n}/part.tmp",
)


@dataclass(frozen=True)
class HistoryShape:
    """Parameters of the history.

    `top_share` is the share of the largest tenant; 0 distributes tasks evenly.
    """

    tasks: int
    days: int = 30
    first_day: date = date(2026, 1, 1)
    tenants: int = 20
    top_share: float = 0.35
    late_share: float = 0.002
    seed: int = 1
    tenant_ids: tuple[str, ...] = ()


def generate_history(spark: SparkSession, shape: HistoryShape, *, parallelism: int | None = None) -> DataFrame:
    """Return rows as in the audit (`schemas.SOURCE`).

    The additional column `arrived_at` is the time at which the audit received the row.
    """
    tasks = spark.range(0, shape.tasks, 1, parallelism or spark.sparkContext.defaultParallelism * 2).select(
        F.col("id").alias("task")
    )
    return _build_rows(_build_attempts(_build_tasks(tasks, shape), shape), shape)


def _draw(shape: HistoryShape, purpose: str, *keys: str) -> Column:
    """Return a number in [0, 1), a hash of the seed, the purpose and the row's keys."""
    hashed = F.xxhash64(F.lit(shape.seed), F.lit(purpose), *(F.col(key) for key in keys or ("task",)))
    return F.shiftrightunsigned(hashed, 11) * F.lit(2.0**-53)


def _choose(values: tuple[str, ...], index: Column) -> Column:
    return F.element_at(F.array(*(F.lit(value) for value in values)), index.cast("int") + 1)


def _build_tasks(tasks: DataFrame, shape: HistoryShape) -> DataFrame:
    tenant = F.when(_draw(shape, "top") < shape.top_share, 0).otherwise(
        F.floor(F.pow(_draw(shape, "tenant"), 1.6 if shape.top_share else 1.0) * shape.tenants)
    )
    start = int(datetime.combine(shape.first_day, datetime.min.time(), UTC).timestamp() * 1000)
    hours = tuple(str(hour) for hour, weight in enumerate(RHYTHM) for _ in range(weight))
    # A burst takes place in the first half of minute 17 of an hour.
    minute = _draw(shape, "minute")
    millis = F.when(F.col("is_burst"), 17 * 60_000 + F.floor(minute * 30_000)).otherwise(F.floor(minute * 3_600_000))
    return tasks.withColumn("is_burst", _draw(shape, "burst") < 0.05).select(
        "task",
        "is_burst",
        tenant.cast("int").alias("tenant_no"),
        F.floor(F.pow(_draw(shape, "command"), 1.5) * len(COMMANDS)).cast("int").alias("command_no"),
        F.floor(F.pow(_draw(shape, "priority"), 4) * 10).cast("int").alias("priority"),
        F.floor(200 - 3000 * F.log(1 - _draw(shape, "payload"))).alias("payload_bytes"),
        (
            F.lit(start)
            + F.floor(_draw(shape, "day") * shape.days) * 86_400_000
            + _choose(hours, F.floor(_draw(shape, "hour") * len(hours))).cast("long") * 3_600_000
            + millis
        ).alias("created"),
    )


def _build_attempts(tasks: DataFrame, shape: HistoryShape) -> DataFrame:
    """Return a row for each attempt of a task, up to the first one that succeeds."""
    mean = _choose(tuple(str(int(seconds * 1000)) for _, seconds, _ in COMMANDS), F.col("command_no")).cast("double")
    failure_share = _choose(tuple(str(share) for _, _, share in COMMANDS), F.col("command_no")).cast("double")
    is_hopeless = _draw(shape, "hopeless") < failure_share / 20
    wait_factor = F.when(F.col("is_burst"), 20.0).otherwise(1.0)
    frame, visible = tasks, F.col("created")
    for number in range(1, MAX_ATTEMPTS + 1):
        normal = F.sqrt(-2 * F.log(1 - _draw(shape, f"run {number}"))) * F.cos(
            _draw(shape, f"angle {number}") * 2 * math.pi
        )
        # Lognormal distribution: most runs are short, a few take many times the mean.
        run = 1 + F.floor(mean * F.exp(SIGMA * normal - SIGMA**2 / 2))
        is_expired = _draw(shape, f"expire {number}") < 0.002
        claimed = visible - F.floor(400 * wait_factor * F.log(1 - _draw(shape, f"wait {number}")))
        frame = frame.withColumns(
            {
                f"visible{number}": visible,
                f"claimed{number}": claimed,
                f"ended{number}": claimed + F.when(is_expired, 300_000).otherwise(run),
                f"expired{number}": is_expired,
                f"failed{number}": is_hopeless | is_expired | (_draw(shape, f"fail {number}") < failure_share),
            }
        )
        visible = F.col(f"ended{number}") + 5_000 * 2 ** (number - 1)
    count: Column = F.lit(MAX_ATTEMPTS)
    for number in reversed(range(1, MAX_ATTEMPTS)):
        count = F.when(~F.col(f"failed{number}"), number).otherwise(count)
    attempts = [
        F.struct(
            F.lit(number).alias("number"),
            *(F.col(f"{name}{number}").alias(name) for name in ("visible", "claimed", "ended", "expired", "failed")),
        )
        for number in range(1, MAX_ATTEMPTS + 1)
    ]
    task_columns = ("task", "tenant_no", "command_no", "priority", "payload_bytes", "created")
    return frame.select(*task_columns, F.explode(F.slice(F.array(*attempts), F.lit(1), count)).alias("one")).select(
        *task_columns, "one.*"
    )


def _build_rows(attempts: DataFrame, shape: HistoryShape) -> DataFrame:
    def draw(purpose: str) -> Column:
        return _draw(shape, purpose, "task", "number")

    failed, expired = F.col("failed"), F.col("expired")
    outcome = F.when(~failed, "COMPLETED").when(expired, "EXPIRED").when(draw("how") < 0.1, "ABANDONED")
    status = F.when(~failed, "COMPLETED").when(F.col("number") == MAX_ATTEMPTS, "FAILED").otherwise("PENDING")
    text = _choose(ERRORS, F.floor(F.pow(draw("error"), 2) * len(ERRORS)))
    for placeholder, value in (
        ("{n}", F.floor(draw("n") * 1e6).cast("long").cast("string")),
        ("{ip}", F.concat(F.lit("10.0."), F.floor(draw("ip") * 256).cast("int").cast("string"), F.lit(".7"))),
        ("{uuid}", _build_uuid(shape, F.col("created"), "error", "task", "number")),
    ):
        text = F.replace(text, F.lit(placeholder), value)
    names = shape.tenant_ids or tuple(f"t{number:04d}" for number in range(shape.tenants))
    # Late rows arrive up to e^15 s = 38 days after their end, the others one second after it.
    late_seconds = F.when(draw("late") < shape.late_share, F.exp(draw("lateness") * 15)).otherwise(1.0)
    rows = attempts.select(
        _choose(names, F.least(F.col("tenant_no"), F.lit(len(names) - 1))).alias("tenant"),
        (F.col("task") * (MAX_ATTEMPTS + 1) + F.col("number")).alias("id"),
        _build_uuid(shape, F.col("created"), "task", "task").alias("task_id"),
        "number",
        _choose(tuple(name for name, _, _ in COMMANDS), F.col("command_no")).alias("command"),
        "priority",
        *(
            F.timestamp_millis(millis).alias(f"{name}_at")
            for name, millis in (
                ("created", "created"),
                ("visible", "visible"),
                ("claimed", "claimed"),
                ("ended", "ended"),
            )
        ),
        outcome.otherwise("NACKED").alias("outcome"),
        status.alias("status"),
        F.concat(F.lit("worker-"), F.floor(draw("worker") * 50).cast("int").cast("string")).alias("worker"),
        F.when(expired, "LEASE_EXPIRED").when(failed, text).otherwise("").alias("error"),
        "payload_bytes",
        F.when(failed, 0).otherwise(F.floor(100 + 900 * draw("result"))).alias("result_bytes"),
        F.timestamp_millis(F.col("ended") + (late_seconds * 1000).cast("long")).alias("arrived_at"),
    )
    return rows.select(
        *(F.col(c.name).cast(schemas.TYPES[c.type]).alias(c.name) for c in schemas.SOURCE.columns), "arrived_at"
    )


def _build_uuid(shape: HistoryShape, millis: Column, purpose: str, *keys: str) -> Column:
    """Return a version 7 UUID of the given time, with a hash as its random part."""

    def digits(salt: str, count: int) -> Column:
        hashed = F.xxhash64(F.lit(shape.seed), F.lit(f"{purpose} {salt}"), *(F.col(key) for key in keys))
        return F.substring(F.lower(F.lpad(F.hex(hashed), 16, "0")), 1, count)

    time = F.lower(F.lpad(F.hex(millis), 12, "0"))
    return F.concat(
        F.substring(time, 1, 8), F.lit("-"), F.substring(time, 9, 4), F.lit("-7"), digits("a", 3), F.lit("-a"),
        digits("b", 3), F.lit("-"), digits("c", 12),
    )  # fmt: skip


def write_to_audit(rows: DataFrame, dsn: str, *, table: str = "queues_attempt") -> int:
    """Write synthetic rows to the audit in the order of their arrival. Return their number."""
    import psycopg
    from pyarrow import csv

    names = [c.name for c in schemas.SOURCE.columns if c.name != "id"]
    columns = ", ".join("tenant_id" if name == "tenant" else name for name in names)
    written = 0
    with psycopg.connect(dsn) as connection:
        statement = f"COPY {table} ({columns}) FROM STDIN (FORMAT csv)"
        with connection.cursor().copy(statement) as copy:
            batches = rows.orderBy("arrived_at", "id").select(*names).toArrow().to_batches(max_chunksize=50_000)
            for batch in batches:
                text = io.BytesIO()
                csv.write_csv(batch, text, csv.WriteOptions(include_header=False))
                copy.write(text.getvalue())
                written += batch.num_rows
    return written
