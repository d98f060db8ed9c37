"""Each transform on a few rows whose results can be checked by hand."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

import pytest

from pipeline.models import MARTS
from pipeline.spark import erlang, schemas
from pipeline.spark.transforms.capacity import capacity
from pipeline.spark.transforms.failures import failures
from pipeline.spark.transforms.latency import latency
from pipeline.spark.transforms.leases import leases
from pipeline.spark.transforms.throughput import throughput
from pipeline.spark.transforms.usage import usage
from pipeline.spark.transforms.webhooks import deliveries, webhooks
from tests.pipeline.history import (
    DAY,
    at,
    build_attempt,
    build_dead_attempt,
    build_facts,
    build_retried_attempt,
)


def collect_rows(frame: Any) -> list[dict[str, Any]]:
    """Collect rows as plain values with times in UTC.

    Spark returns times in this process' time zone.
    """
    return [
        {k: v.astimezone(DAY.tzinfo) if isinstance(v, datetime) else v for k, v in row.asDict().items()}
        for row in frame.orderBy(*[c for c in ("date", "tenant", "command", "hour") if c in frame.columns]).collect()
    ]


def test_attempt_read_several_times_counts_once(spark: Any) -> None:
    row = build_attempt()
    frame = build_facts(spark, row, row, row | {"number": 2}, row, build_attempt())
    assert sorted((r["task_id"], r["number"]) for r in collect_rows(frame)).count((row["task_id"], 1)) == 1
    assert frame.count() == 3


def test_clock_that_went_back_gives_no_negative_wait(spark: Any) -> None:
    row = build_attempt() | {"visible_at": at("13:00")}
    assert collect_rows(build_facts(spark, row))[0]["wait_ms"] == 0


def test_throughput_counts_attempts_by_outcome(spark: Any) -> None:
    rows = [
        build_attempt("09:00"),
        build_attempt("09:59:59.999", number=2),
        build_retried_attempt(ended="09:30"),
        build_dead_attempt(ended="09:31"),
        build_attempt("09:10", outcome="FAILED", status="FAILED"),
        build_attempt("09:11", outcome="EXPIRED", status="PENDING"),
        build_attempt("09:12", outcome="ABANDONED", status="FAILED"),
        build_attempt("10:00"),
        build_attempt(tenant_id="other001"),
        build_attempt("09:15", outcome="CANCELLED", status="CANCELLED", claimed_at=None, number=0),
    ]
    mart_rows = collect_rows(throughput(build_facts(spark, *rows)))
    assert [(r["tenant"], r["hour"].hour, r["attempts"]) for r in mart_rows] == [
        ("acme0001", 9, 8), ("acme0001", 10, 1), ("other001", 12, 1),
    ]  # fmt: skip
    nine = mart_rows[0]
    assert {name: nine[name] for name in ("completed", "failed", "nacked", "abandoned", "expired", "cancelled")} == {
        "completed": 2, "failed": 1, "nacked": 2, "abandoned": 1, "expired": 1, "cancelled": 1,
    }  # fmt: skip
    assert (nine["retries"], nine["ended"], nine["dead"]) == (1, 6, 2)


def test_quantiles_are_exact(spark: Any) -> None:
    rows = [build_attempt(wait=n, run=2 * n) for n in range(1, 101)]
    unclaimed = build_attempt(claimed_at=None, outcome="CANCELLED", status="CANCELLED")
    (row,) = collect_rows(latency(build_facts(spark, *reversed(rows), unclaimed)))
    assert row["attempts"] == 100
    assert [row[f"wait_{name}_ms"] for name in ("p50", "p95", "p99", "max")] == [50_000, 95_000, 99_000, 100_000]
    assert [row[f"run_{name}_ms"] for name in ("p50", "p95", "p99", "max")] == [100_000, 190_000, 198_000, 200_000]
    assert (row["wait_mean_ms"], row["run_mean_ms"]) == (50_500.0, 101_000.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_quantiles_of_a_few_values_are_among_the_values(spark: Any, count: int) -> None:
    (row,) = collect_rows(latency(build_facts(spark, *(build_attempt(wait=n) for n in range(1, count + 1)))))
    assert row["wait_p50_ms"] == 1000 * -(-count // 2)
    assert row["wait_p99_ms"] == row["wait_max_ms"] == 1000 * count


def test_failures_are_grouped_by_fingerprint(spark: Any) -> None:
    rows = [
        build_retried_attempt(ended="09:00", error="timeout after 10 ms"),
        build_dead_attempt(ended="11:00", error="timeout after 2500 ms"),
        build_retried_attempt(ended="10:00", error="HTTP 503"),
        build_retried_attempt(ended="10:00", error="timeout after 10 ms", command="resize"),
        build_attempt("09:30", outcome="EXPIRED", status="PENDING", error="LEASE_EXPIRED"),
        build_attempt("09:30", outcome="ABANDONED", status="PENDING"),
        build_attempt("09:00", error="ignored: it completed"),
    ]
    mart_rows = collect_rows(failures(build_facts(spark, *rows)))
    by_name = {row["fingerprint"]: row for row in mart_rows}
    assert set(by_name) == {
        "render: timeout after <n> ms", "render: HTTP 503", "resize: timeout after <n> ms", "render: LEASE_EXPIRED",
        "render: ABANDONED",
    }  # fmt: skip
    group = by_name["render: timeout after <n> ms"]
    assert (group["attempts"], group["dead"]) == (2, 1)
    assert (group["first_at"], group["last_at"]) == (at("09:00"), at("11:00"))
    assert group["example"] == min(rows[0]["task_id"], rows[1]["task_id"])


def test_usage_counts_ended_tasks_and_run_time(spark: Any) -> None:
    task = build_attempt(run=3, payload_bytes=1000, result_bytes=0, outcome="NACKED", status="PENDING")
    again = task | {"number": 2, "outcome": "COMPLETED", "status": "COMPLETED", "result_bytes": 70}
    withdrawn = build_attempt(claimed_at=None, outcome="CANCELLED", status="CANCELLED", payload_bytes=5)
    (row,) = collect_rows(usage(build_facts(spark, task, again, withdrawn)))
    assert (row["tasks"], row["attempts"], row["compute_ms"]) == (2, 3, 6000)
    assert (row["payload_bytes"], row["result_bytes"], row["delivered_bytes"]) == (1005, 80, 2000)


def test_capacity_counts_attempts_in_the_hour_they_became_due(spark: Any) -> None:
    tomorrow = DAY + timedelta(days=1)
    rows = [build_attempt("10:30", run=60.0) for _ in range(120)]
    # One became due at 23:50 and ran after midnight. Another ended two days later, beyond the lookahead.
    rows += [
        build_attempt("00:10", wait=1200, run=10, day=tomorrow),
        build_attempt("12:00", wait=36 * 3600 + 60, day=tomorrow),
    ]
    mart_rows = {(r["date"], r["hour"].hour): r for r in collect_rows(capacity(build_facts(spark, *rows)))}
    assert set(mart_rows) == {(DAY.date(), 10), (DAY.date(), 23)}
    ten = mart_rows[(DAY.date(), 10)]
    assert (ten["arrivals"], ten["service_mean_ms"], ten["service_cv2"], ten["load"]) == (120, 60_000.0, 0.0, 2.0)
    assert ten["workers_60s"] == int(erlang.workers_needed([120 / 3600], [60.0], [0.0], 60.0)[0]) == 3
    assert ten["workers_1s"] > ten["workers_60s"]
    assert mart_rows[(DAY.date(), 23)]["arrivals"] == 1


def test_leases_are_advised_from_completed_runs(spark: Any) -> None:
    rows = [build_attempt(run=n) for n in range(1, 101)]
    rows += [build_attempt(run=300, outcome="EXPIRED", status="PENDING", error="LEASE_EXPIRED") for _ in range(2)]
    rows += [build_attempt(run=1, number=3), build_attempt(run=1, command="rare")]
    by_command = {row["command"]: row for row in collect_rows(leases(build_facts(spark, *rows)))}
    row = by_command["render"]
    assert (row["completed"], row["expired"], row["duplicate_ms"]) == (101, 2, 600_000)
    assert (row["run_p99_ms"], row["lease_advice_seconds"]) == (99_000, 198)
    assert row["max_attempts_advice"] == 4
    assert by_command["rare"]["lease_advice_seconds"] is None


def test_webhooks_are_counted_by_endpoint(spark: Any) -> None:
    def build_delivery(
        i: int, status: int | None, ms: int, endpoint: str = "https://a.example/hook"
    ) -> tuple[Any, ...]:
        values = {
            "date": DAY.date(), "tenant": "acme0001", "id": i, "delivery_id": f"d{i}", "number": 1, "command": "render",
            "endpoint": endpoint, "started_at": at("09:30"), "duration_ms": ms, "status_code": status,
            "delivered": int(status is not None and 200 <= status < 300), "error": "",
        }  # fmt: skip
        return tuple(values[name] for name in schemas.DELIVERIES_RAW.names)

    rows = [build_delivery(i, 200, i) for i in range(1, 101)] + [
        build_delivery(101, 500, 7),
        build_delivery(102, None, 10_000),
    ]
    rows += [build_delivery(1, 200, 1), build_delivery(103, 410, 5, "https://b.example/")]
    raw = spark.createDataFrame(rows, schemas.DELIVERIES_RAW.struct)
    first, second = sorted(collect_rows(webhooks(deliveries(raw))), key=lambda row: str(row["endpoint"]))
    assert (first["attempts"], first["delivered"], first["refused"], first["unreachable"]) == (102, 100, 1, 1)
    assert (first["latency_p50_ms"], first["latency_max_ms"]) == (50, 100)
    assert (second["delivered"], second["refused"]) == (0, 1)


@pytest.mark.parametrize("name", schemas.MARTS)
def test_model_of_a_mart_has_the_columns_of_its_contract(name: str) -> None:
    fields = [field.name for field in MARTS[name]._meta.concrete_fields if field.name != "id"]
    assert sorted(fields) == sorted(schemas.MARTS[name].names)
    assert MARTS[name]._meta.db_table == f"pipeline_{name}"
    nullable = {field.name for field in MARTS[name]._meta.concrete_fields if field.null}
    assert nullable == {column.name for column in schemas.MARTS[name].columns if column.optional}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("id bigint, name string", None),
        ("id int, name string", None),
        ("id bigint", None),
        ("name string", "id is missing"),
        ("id string, name string", "id is string, not bigint"),
        ("identifier bigint, name string", "id is missing, identifier is unknown"),
        ("id bigint, name string, extra int", "extra is unknown"),
    ],
)
def test_contract_check_names_each_problem(spark: Any, columns: str, problem: str | None) -> None:
    table = schemas.TableContract(
        "t", (schemas.ContractColumn("id", "long"), schemas.ContractColumn("name", "string", True)), ("id",), ()
    )
    schema = spark.createDataFrame([], columns).schema
    if problem is None:
        schemas.check(table, schema, "here")
    else:
        with pytest.raises(schemas.ContractBroken, match=f"^here: {problem}$"):
            schemas.check(table, schema, "here")


def test_day_is_in_utc(spark: Any) -> None:
    day = date(2026, 3, 29)  # clocks in Berlin change from 02:00 to 03:00
    midnight = datetime(2026, 3, 29, tzinfo=DAY.tzinfo)
    ends = [midnight - timedelta(milliseconds=1), midnight, midnight + timedelta(hours=1), midnight + timedelta(days=1)]
    frame = build_facts(spark, *(build_attempt(end) for end in ends))
    assert [row["date"] for row in collect_rows(frame.orderBy("ended_at"))] == [
        day - timedelta(days=1), day, day, day + timedelta(days=1),
    ]  # fmt: skip
    hours = [row["hour"] for row in collect_rows(throughput(frame))]
    assert hours == [
        midnight - timedelta(hours=1),
        midnight,
        midnight + timedelta(hours=1),
        midnight + timedelta(days=1),
    ]
