"""Guarantees about history: the same rows give the same tables, in any order."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pipeline.spark import cli, jobs, schemas, sinks, snapshots, sources
from pipeline.spark.jobs import compact
from pipeline.spark.jobs.context import HORIZON_DAYS
from pipeline.spark.lake import Lake, files
from pipeline.spark.synthetic import HistoryShape, generate_history, write_to_audit
from tests.pipeline.history import (
    DAY,
    Audit,
    build_attempt,
    build_dead_attempt,
    build_mixed_attempts,
    count_rows,
    read_digests,
)

FAST_MARTS = ("throughput", "usage")  # sufficient to detect a difference in the facts


@pytest.fixture
def other_lake(tmp_path: Path) -> Lake:
    """A second, empty lake."""
    return Lake(str(tmp_path / "another"))


@pytest.mark.spec("PIP-2", "A repeated run gives the same content")
def test_repeated_run_changes_nothing(run: Any, lake: Lake, other_lake: Lake, audit: Audit) -> None:
    audit.add(build_mixed_attempts(300, random.Random(1)))
    all_jobs = [name for name in jobs.JOBS if name != "publish"]
    run(*all_jobs)
    number = lake.root().number
    assert sum(report.rows_out for report in run(*all_jobs).values()) == 0
    assert lake.root().number == number
    before = read_files(lake, "attempts", *schemas.MARTS)
    run("attempts", *FAST_MARTS, since=DAY.date())
    run(*all_jobs, lake=other_lake)
    assert lake.root().number > number
    # Computing the marts again here, or from the audit in another lake, gives files with the same bytes.
    assert read_files(lake, "attempts", *schemas.MARTS) == before
    assert read_files(other_lake, "attempts", *schemas.MARTS) == before


def read_files(lake: Lake, *tables: str) -> dict[str, list[bytes]]:
    """Return the bytes of every file, by table and partition."""
    return {
        f"{table}/{key}": [Path(path.removeprefix("file://")).read_bytes() for path in lake.paths(manifest, [key])]
        for table in tables
        for manifest in [lake.manifest(table)]
        for key in manifest.partitions
    }


@pytest.mark.spec("PIP-2", "Two concurrent runs give the same result as one")
def test_two_concurrent_runs_give_the_result_of_one(run: Any, lake: Lake, other_lake: Lake, audit: Audit) -> None:
    audit.add(build_mixed_attempts(200, random.Random(2)))
    run("ingest", "attempts", *FAST_MARTS, lake=other_lake)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, "ingest", "attempts", *FAST_MARTS) for _ in range(2)]:
            future.result()
    tables = ("attempts", *FAST_MARTS)
    assert read_digests(lake, *tables) == read_digests(other_lake, *tables)
    assert count_rows(lake) == audit.count_per_partition()


@pytest.mark.spec("PIP-2", "Attempts that are read three times, in any order, count once")
def test_attempts_read_three_times_in_any_order_count_once(
    run: Any, spark: Any, lake: Lake, other_lake: Lake, audit: Audit, tmp_path: Path
) -> None:
    rows = build_mixed_attempts(150, random.Random(3))
    audit.add(rows)
    run("ingest", "attempts", *FAST_MARTS, lake=other_lake)
    with snapshots.hold_snapshot(audit.dsn) as snapshot:
        source = sources.read(spark, audit.dsn, snapshot, via="python").persist()
        for i in range(3):
            source.orderBy((source.id * (7 + i)) % 31).coalesce(1).write.parquet(str(tmp_path / "fed" / str(i)))
        source.unpersist()
    report = run("ingest", files=str(tmp_path / "fed" / "0"))
    assert report["ingest"].rows_out == 150
    run("attempts", *FAST_MARTS)
    run("ingest", files=str(tmp_path / "fed"))
    run("attempts", *FAST_MARTS)
    assert lake.manifest("raw").rows == 600
    assert read_digests(lake, "attempts", *FAST_MARTS) == read_digests(other_lake, "attempts", *FAST_MARTS)


LATENESS = [timedelta(seconds=1), timedelta(minutes=10), timedelta(hours=5), timedelta(days=1), timedelta(days=40)]


@pytest.mark.spec("PIP-2", "A late row changes its day and no other; beyond the horizon it is counted as dropped")
def test_late_row_changes_its_day_only(run: Any, lake: Lake, other_lake: Lake, audit: Audit) -> None:
    now = DAY + timedelta(hours=12)
    tables = ("attempts", "throughput", "usage", "capacity")
    audit.add(
        [build_attempt(now - delay - timedelta(seconds=i)) for delay in LATENESS for i in range(3)]
        + [build_attempt(now)]
    )
    run("ingest", *tables)
    before = {table: dict(lake.manifest(table).partitions) for table in tables}
    late = [build_attempt(now - delay - timedelta(seconds=30), tenant_id="acme0001") for delay in LATENESS]
    dropped = [build_attempt(now - timedelta(days=HORIZON_DAYS + days)) for days in (1, 300)]
    audit.add(late + dropped)
    reports = run("ingest", *tables)
    assert (reports["ingest"].rows_out, reports["ingest"].late_dropped) == (len(LATENESS), 2)
    assert reports["attempts"].partitions == len({(now - delay).date() for delay in LATENESS})
    expected = audit.count_per_partition()
    for row in dropped:
        del expected[f"{row['ended_at'].date()}/acme0001"]
    assert count_rows(lake) == expected
    # The result of several runs equals that of one run over everything.
    run(
        "ingest",
        *tables,
        lake=other_lake,
        until=(now + timedelta(days=1)).date(),
        since=(now - timedelta(days=44)).date(),
    )
    assert read_digests(lake, *tables) == read_digests(other_lake, *tables)
    assert before["attempts"].keys() <= lake.manifest("attempts").partitions.keys()


def test_run_computes_only_changed_days_and_tenants(run: Any, lake: Lake, audit: Audit) -> None:
    tomorrow = DAY + timedelta(days=1)
    audit.add([build_attempt(), build_attempt(tenant_id="beta0002"), build_attempt(day=tomorrow)])
    run("ingest", "attempts", "usage")
    before = lake.manifest("attempts").partitions
    audit.add([build_attempt(tenant_id="beta0002")])
    reports = run("ingest", "attempts", "usage")
    assert (reports["attempts"].rows_in, reports["attempts"].partitions) == (2, 1)
    assert reports["usage"].rows_in == 2
    after = lake.manifest("attempts").partitions
    assert [key for key in after if after[key] != before[key]] == ["2026-03-10/beta0002"]
    assert count_rows(lake, "usage") == {"2026-03-10": 2, "2026-03-11": 1}


def test_files_of_a_past_day_are_merged_into_one(
    run: Any, lake: Lake, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "MAX_FILES", 1)
    tomorrow, run_count = DAY + timedelta(days=1), 2
    for number in range(run_count):
        audit.add(
            [build_attempt(), build_attempt(), build_attempt(day=tomorrow), build_attempt(tenant_id=f"once{number:04}")]
        )
        run("ingest")
    # Files are not merged before the facts are computed from them.
    assert run("compact")["compact"].partitions == 0
    run("attempts", "usage")
    before = read_digests(lake, "attempts", "usage")
    report = run("compact")["compact"]
    assert (report.partitions, report.rows_in, report.rows_out) == (1, 2 * run_count, 2 * run_count)
    raw = lake.manifest("raw").partitions
    assert {key: len(raw[key].files) for key in raw if "acme" in key} == {
        "2026-03-10/acme0001": 1, "2026-03-11/acme0001": run_count,
    }  # fmt: skip
    second = run("ingest", "attempts", "compact", "usage")
    assert [second[name].partitions for name in ("attempts", "compact", "usage")] == [0, 0, 0]
    # A late row still changes the day.
    audit.add([build_attempt()])
    assert run("ingest", "attempts", "usage")["attempts"].partitions == 1
    assert count_rows(lake) == audit.count_per_partition()
    after = read_digests(lake, "attempts", "usage")
    assert {key for key in after if before[key] != after[key]} == {"attempts/2026-03-10/acme0001", "usage/2026-03-10"}


@pytest.mark.spec("PIP-2", "Totals per tenant and day equal the audit exactly")
def test_totals_equal_those_of_the_audit(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    shape = HistoryShape(1500, days=5, tenants=4, tenant_ids=("acme0001", "beta0002", "corp0003", "dash0004"), seed=7)
    assert write_to_audit(generate_history(spark, shape), audit.dsn) > 1500
    assert run("ingest", "attempts", "throughput")["ingest"].quarantined == 0
    assert count_rows(lake) == audit.count_per_partition()
    manifest = lake.manifest("throughput")
    rows = sinks.load(spark, lake, schemas.MARTS["throughput"], manifest, manifest.partitions).collect()
    columns = ("attempts", "completed", "nacked", "expired", "dead", "retries")
    totals: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for column in columns:
            totals[f"{row['date']}/{row['tenant']}", column] += row[column]
    expected_rows = audit.query(
        "SELECT (ended_at AT TIME ZONE 'UTC')::date || '/' || tenant_id, count(*),"
        " count(*) FILTER (WHERE outcome = 'COMPLETED'), count(*) FILTER (WHERE outcome = 'NACKED'),"
        " count(*) FILTER (WHERE outcome = 'EXPIRED'),"
        " count(*) FILTER (WHERE status = 'FAILED' AND outcome IN ('NACKED','ABANDONED','EXPIRED')),"
        " count(*) FILTER (WHERE number > 1) FROM queues_attempt GROUP BY 1"
    )
    assert totals == Counter(
        {(key, c): n for key, *numbers in expected_rows for c, n in zip(columns, numbers, strict=True)}
    )


def test_quantiles_equal_those_of_postgresql(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    audit.add(build_mixed_attempts(400, random.Random(5)))
    run("ingest", "attempts", "latency")
    manifest = lake.manifest("latency")
    rows = sinks.load(spark, lake, schemas.MARTS["latency"], manifest, manifest.partitions)
    actual = {
        (row["tenant"], row["command"], row["h"]): (row["wait_p50_ms"], row["wait_p99_ms"], row["run_p95_ms"])
        for row in rows.selectExpr("*", "unix_seconds(hour) AS h").collect()
    }
    wait_ms, run_ms = (
        "extract(epoch FROM claimed_at - visible_at) * 1000",
        "extract(epoch FROM ended_at - claimed_at) * 1000",
    )
    expected_rows = audit.query(
        "SELECT tenant_id, command, extract(epoch FROM date_trunc('hour', ended_at))::bigint,"
        f" percentile_disc(0.5) WITHIN GROUP (ORDER BY {wait_ms})::bigint,"
        f" percentile_disc(0.99) WITHIN GROUP (ORDER BY {wait_ms})::bigint,"
        f" percentile_disc(0.95) WITHIN GROUP (ORDER BY {run_ms})::bigint FROM queues_attempt GROUP BY 1, 2, 3"
    )
    assert actual == {tuple(row[:3]): tuple(row[3:]) for row in expected_rows}


def test_day_without_rows_has_no_partition(run: Any, lake: Lake, audit: Audit) -> None:
    assert all(report.rows_in == 0 for report in run(*jobs.JOBS).values())
    audit.add([build_attempt(), build_attempt(day=DAY + timedelta(days=2))])
    run("ingest", "attempts", *FAST_MARTS)
    assert sorted(count_rows(lake, "usage")) == ["2026-03-10", "2026-03-12"]
    run(
        "ingest",
        "attempts",
        *FAST_MARTS,
        since=(DAY + timedelta(days=1)).date(),
        until=(DAY + timedelta(days=2)).date(),
    )
    assert sorted(count_rows(lake, "usage")) == ["2026-03-10", "2026-03-12"]


@pytest.mark.spec("PIP-4", "A tenant's export contains no data of another tenant")
def test_export_contains_no_data_of_another_tenant(
    run: Any, spark: Any, lake: Lake, audit: Audit, tmp_path: Path
) -> None:
    canary = "CANARY-of-beta-9a1b"
    audit.add(
        [
            build_attempt(),
            build_dead_attempt(error="mine"),
            build_dead_attempt(tenant_id="beta0002", command=canary, worker=canary, error=canary),
        ]
    )
    run("ingest", "attempts", "failures", "throughput")
    for table in ("attempts", "failures", "throughput"):
        output: list[str] = []
        to = tmp_path / table
        options = type("Options", (), {"table": table, "tenant": "acme0001", "to": str(to)})
        cli.run_export(spark, lake.url, options, output.append)
        frame = spark.read.parquet(str(to))
        assert frame.count() > 0
        assert {row["tenant"] for row in frame.collect()} == {"acme0001"}
        assert not any(canary.encode() in file.read_bytes() for file in to.iterdir())
    # The tenant is passed as a value, not as SQL.
    options = type("Options", (), {"table": "attempts", "tenant": "x' OR 'a'='a", "to": str(tmp_path / "hostile")})
    cli.run_export(spark, lake.url, options, output.append)
    assert spark.read.parquet(str(tmp_path / "hostile")).count() == 0
    assert all("tenant=acme0001" in file for file in files(lake.url, "attempts", tenant="acme0001"))


SOURCE_COLUMNS = (
    "id", "concat('00000000-0000-7000-8000-', lpad(hex(id), 12, '0')) AS task_id", "1 AS number", "'c' AS command",
    "0 AS priority", "timestamp_millis(1773100800000 + id) AS created_at", "created_at AS visible_at",
    "created_at AS claimed_at", "timestamp_millis(1773100800000 + id + id % 997) AS ended_at", "'COMPLETED' AS outcome",
    "'COMPLETED' AS status", "'w' AS worker", "'' AS error", "id AS payload_bytes", "id AS result_bytes",
)  # fmt: skip


@pytest.mark.spec("PIP-1", "A tenant with 95 % of the rows increases the run time at most threefold")
def test_skewed_tenant_costs_little_more_than_a_balanced_one(
    run: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large partition is divided into files, so that several Spark tasks process it."""
    monkeypatch.setattr(sinks, "ROWS_PER_FILE", 5_000)
    shares = {"warm": "0", "balanced": "id % 20", "skewed": "if(id % 100 < 95, 0, id % 20)"}

    def measure_seconds(name: str, to: Path) -> float:
        source, into = to / f"{name}-source", Lake(str(to / name))
        rows = spark.range(1000 if name == "warm" else 30_000)
        rows.selectExpr(*SOURCE_COLUMNS, f"concat('t', {shares[name]}) AS tenant").write.parquet(str(source))
        run("ingest", files=str(source), lake=into)
        return sum(report.seconds for report in run("attempts", "latency", "usage", lake=into).values())

    seconds = {name: measure_seconds(name, tmp_path) for name in shares}
    largest = max(Lake(str(tmp_path / "skewed")).manifest("attempts").partitions.values(), key=lambda part: part.rows)
    assert largest.rows == 28_500
    assert len(largest.files) > 1
    if seconds["skewed"] > 3 * seconds["balanced"]:  # repeat: another program may have used the CPU
        seconds = {name: measure_seconds(name, tmp_path / "again") for name in shares}
    assert seconds["skewed"] <= 3 * seconds["balanced"], seconds


def test_published_mart_equals_the_lake_and_is_never_partial(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add(build_mixed_attempts(100, random.Random(8)))
    run("ingest", "attempts", "throughput", "failures", "leases", "publish")
    totals = [audit.query("SELECT sum(attempts) FROM pipeline_throughput")[0][0]]
    audit.add(build_mixed_attempts(100, random.Random(9)))
    with psycopg.connect(audit.dsn) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        assert reader.execute("SELECT sum(attempts) FROM pipeline_throughput").fetchone() == (100,)
        reports = run("ingest", "attempts", "throughput", "publish")
        assert reader.execute("SELECT sum(attempts) FROM pipeline_throughput").fetchone() == (100,)
    assert reports["publish"].partitions > 0
    totals.append(audit.query("SELECT sum(attempts) FROM pipeline_throughput")[0][0])
    assert totals == [100, 200]
    for mart in schemas.MARTS:
        assert audit.query(f"SELECT count(*) FROM pipeline_{mart}")[0][0] == lake.manifest(mart).rows
    assert run("publish")["publish"].partitions == 0
    # A mart whose rows were deleted is written again on request.
    with psycopg.connect(audit.dsn) as connection:
        connection.execute("DELETE FROM pipeline_throughput")
    assert run("publish")["publish"].partitions == 0
    run("publish", since=DAY.date())
    assert audit.query("SELECT sum(attempts) FROM pipeline_throughput")[0][0] == 200


def test_row_from_the_future_does_not_close_current_days(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add([build_attempt(), build_attempt(DAY.replace(year=2190))])
    run("ingest")
    audit.add([build_attempt()])
    assert run("ingest", "attempts")["ingest"].late_dropped == 0
    assert count_rows(lake) == audit.count_per_partition()
