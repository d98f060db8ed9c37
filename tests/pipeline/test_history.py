"""The promises about history: the same rows make the same tables, in whatever order and however often they come."""

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
from pipeline.spark.jobs.running import HORIZON_DAYS
from pipeline.spark.lake import Lake, files
from pipeline.spark.synthetic import HistoryShape, generate_history, write_to_audit
from tests.pipeline.history import DAY, Audit, attempt, counts, digests
from tests.pipeline.test_transforms import dead, retried

CHEAP = ("throughput", "usage")  # marts that show a difference as well as any


@pytest.fixture
def somewhere(tmp_path: Path) -> Lake:
    """Another lake."""
    return Lake(str(tmp_path / "another"))


def mixed(count: int, rng: random.Random) -> list[dict[str, Any]]:
    makers = (attempt, attempt, attempt, retried, dead)
    return [
        rng.choice(makers)(
            ended=DAY + timedelta(seconds=rng.randrange(3 * 86_400)),
            tenant_id=rng.choice(["acme0001", "acme0001", "beta0002", "corp0003"]),
            command=rng.choice(["render", "resize"]),
            run=rng.randrange(1, 100),
            wait=rng.randrange(60),
        )
        for _ in range(count)
    ]


@pytest.mark.spec("PIP-2", "A run that is repeated gives the same content")
def test_a_run_repeated_changes_nothing(run: Any, lake: Lake, somewhere: Lake, audit: Audit) -> None:
    audit.add(mixed(300, random.Random(1)))
    everything = [name for name in jobs.JOBS if name != "publish"]
    run(*everything)
    number = lake.root().number
    assert sum(report.rows_out for report in run(*everything).values()) == 0
    assert lake.root().number == number
    before = content(lake, "attempts", *schemas.MARTS)
    run("attempts", *CHEAP, since=DAY.date())
    run(*everything, lake=somewhere)
    assert lake.root().number > number
    # Computed anew here, and from the beginning elsewhere: files of the same bytes.
    assert content(lake, "attempts", *schemas.MARTS) == before
    assert content(somewhere, "attempts", *schemas.MARTS) == before


def content(lake: Lake, *tables: str) -> dict[str, list[bytes]]:
    """The bytes of every file, by table and partition."""
    return {
        f"{table}/{key}": [Path(path.removeprefix("file://")).read_bytes() for path in lake.paths(manifest, [key])]
        for table in tables
        for manifest in [lake.manifest(table)]
        for key in manifest.partitions
    }


@pytest.mark.spec("PIP-2", "Two runs at once give what one gives")
def test_two_runs_at_once_give_what_one_gives(run: Any, lake: Lake, somewhere: Lake, audit: Audit) -> None:
    audit.add(mixed(200, random.Random(2)))
    run("ingest", "attempts", *CHEAP, lake=somewhere)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, "ingest", "attempts", *CHEAP) for _ in range(2)]:
            done.result()
    tables = ("attempts", *CHEAP)
    assert digests(lake, *tables) == digests(somewhere, *tables)
    assert counts(lake) == audit.totals()


@pytest.mark.spec("PIP-2", "Attempts that come three times, in any order, count once")
def test_attempts_fed_three_times_in_any_order_count_once(
    run: Any, spark: Any, lake: Lake, somewhere: Lake, audit: Audit, tmp_path: Path
) -> None:
    rows = mixed(150, random.Random(3))
    audit.add(rows)
    run("ingest", "attempts", *CHEAP, lake=somewhere)
    with snapshots.hold_snapshot(audit.dsn) as moment:
        once = sources.read(spark, audit.dsn, moment, via="python").persist()
        for i in range(3):
            once.orderBy((once.id * (7 + i)) % 31).coalesce(1).write.parquet(str(tmp_path / "fed" / str(i)))
        once.unpersist()
    report = run("ingest", files=str(tmp_path / "fed" / "0"))
    assert report["ingest"].rows_out == 150
    run("attempts", *CHEAP)
    run("ingest", files=str(tmp_path / "fed"))
    run("attempts", *CHEAP)
    assert lake.manifest("raw").rows == 600
    assert digests(lake, "attempts", *CHEAP) == digests(somewhere, "attempts", *CHEAP)


LATENESS = [timedelta(seconds=1), timedelta(minutes=10), timedelta(hours=5), timedelta(days=1), timedelta(days=40)]


@pytest.mark.spec("PIP-2", "A late row reopens its day, and no other; beyond the horizon it is counted as dropped")
def test_a_late_row_reopens_its_day(run: Any, lake: Lake, somewhere: Lake, audit: Audit) -> None:
    now = DAY + timedelta(hours=12)
    tables = ("attempts", "throughput", "usage", "capacity")
    audit.add([attempt(now - back - timedelta(seconds=i)) for back in LATENESS for i in range(3)] + [attempt(now)])
    run("ingest", *tables)
    before = {table: dict(lake.manifest(table).partitions) for table in tables}
    late = [attempt(now - back - timedelta(seconds=30), tenant_id="acme0001") for back in LATENESS]
    dropped = [attempt(now - timedelta(days=HORIZON_DAYS + days)) for days in (1, 300)]
    audit.add(late + dropped)
    reports = run("ingest", *tables)
    assert (reports["ingest"].rows_out, reports["ingest"].late_dropped) == (len(LATENESS), 2)
    assert reports["attempts"].partitions == len({(now - back).date() for back in LATENESS})
    expected = audit.totals()
    for row in dropped:
        del expected[f"{row['ended_at'].date()}/acme0001"]
    assert counts(lake) == expected
    # What was computed step by step is what one run computes from everything.
    run(
        "ingest",
        *tables,
        lake=somewhere,
        until=(now + timedelta(days=1)).date(),
        since=(now - timedelta(days=44)).date(),
    )
    assert digests(lake, *tables) == digests(somewhere, *tables)
    assert before["attempts"].keys() <= lake.manifest("attempts").partitions.keys()


def test_a_run_touches_only_the_days_and_tenants_that_changed(run: Any, lake: Lake, audit: Audit) -> None:
    tomorrow = DAY + timedelta(days=1)
    audit.add([attempt(), attempt(tenant_id="beta0002"), attempt(day=tomorrow)])
    run("ingest", "attempts", "usage")
    before = lake.manifest("attempts").partitions
    audit.add([attempt(tenant_id="beta0002")])
    reports = run("ingest", "attempts", "usage")
    assert (reports["attempts"].rows_in, reports["attempts"].partitions) == (2, 1)
    assert reports["usage"].rows_in == 2
    after = lake.manifest("attempts").partitions
    assert [key for key in after if after[key] != before[key]] == ["2026-03-10/beta0002"]
    assert counts(lake, "usage") == {"2026-03-10": 2, "2026-03-11": 1}


def test_what_came_in_pieces_is_one_file_when_its_day_is_over(
    run: Any, lake: Lake, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "MAX_FILES", 1)
    tomorrow, pieces = DAY + timedelta(days=1), 2
    for number in range(pieces):
        audit.add([attempt(), attempt(), attempt(day=tomorrow), attempt(tenant_id=f"once{number:04}")])
        run("ingest")
    # Before there are facts of the pieces, nobody may say that they are of the one file.
    assert run("compact")["compact"].partitions == 0
    run("attempts", "usage")
    before = digests(lake, "attempts", "usage")
    report = run("compact")["compact"]
    assert (report.partitions, report.rows_in, report.rows_out) == (1, 2 * pieces, 2 * pieces)
    raw = lake.manifest("raw").partitions
    assert {key: len(raw[key].files) for key in raw if "acme" in key} == {
        "2026-03-10/acme0001": 1, "2026-03-11/acme0001": pieces,
    }  # fmt: skip
    again = run("ingest", "attempts", "compact", "usage")
    assert [again[name].partitions for name in ("attempts", "compact", "usage")] == [0, 0, 0]
    # A late row still reopens the day.
    audit.add([attempt()])
    assert run("ingest", "attempts", "usage")["attempts"].partitions == 1
    assert counts(lake) == audit.totals()
    after = digests(lake, "attempts", "usage")
    assert {key for key in after if before[key] != after[key]} == {"attempts/2026-03-10/acme0001", "usage/2026-03-10"}


@pytest.mark.spec("PIP-2", "Totals per tenant and day equal the audit exactly")
def test_totals_equal_the_audit(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    shape = HistoryShape(1500, days=5, tenants=4, tenant_ids=("acme0001", "beta0002", "corp0003", "dash0004"), seed=7)
    assert write_to_audit(generate_history(spark, shape), audit.dsn) > 1500
    assert run("ingest", "attempts", "throughput")["ingest"].quarantined == 0
    assert counts(lake) == audit.totals()
    manifest = lake.manifest("throughput")
    rows = sinks.load(spark, lake, schemas.MARTS["throughput"], manifest, manifest.partitions).collect()
    columns = ("attempts", "completed", "nacked", "expired", "dead", "retries")
    totals: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for column in columns:
            totals[f"{row['date']}/{row['tenant']}", column] += row[column]
    asked = audit.ask(
        "SELECT (ended_at AT TIME ZONE 'UTC')::date || '/' || tenant_id, count(*),"
        " count(*) FILTER (WHERE outcome = 'COMPLETED'), count(*) FILTER (WHERE outcome = 'NACKED'),"
        " count(*) FILTER (WHERE outcome = 'EXPIRED'),"
        " count(*) FILTER (WHERE status = 'FAILED' AND outcome IN ('NACKED','ABANDONED','EXPIRED')),"
        " count(*) FILTER (WHERE number > 1) FROM queues_attempt GROUP BY 1"
    )
    assert totals == Counter({(key, c): n for key, *numbers in asked for c, n in zip(columns, numbers, strict=True)})


def test_quantiles_equal_postgresqls(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    audit.add(mixed(400, random.Random(5)))
    run("ingest", "attempts", "latency")
    manifest = lake.manifest("latency")
    rows = sinks.load(spark, lake, schemas.MARTS["latency"], manifest, manifest.partitions)
    found = {
        (row["tenant"], row["command"], row["h"]): (row["wait_p50_ms"], row["wait_p99_ms"], row["run_p95_ms"])
        for row in rows.selectExpr("*", "unix_seconds(hour) AS h").collect()
    }
    wait, ran = "extract(epoch FROM claimed_at - visible_at) * 1000", "extract(epoch FROM ended_at - claimed_at) * 1000"
    asked = audit.ask(
        "SELECT tenant_id, command, extract(epoch FROM date_trunc('hour', ended_at))::bigint,"
        f" percentile_disc(0.5) WITHIN GROUP (ORDER BY {wait})::bigint,"
        f" percentile_disc(0.99) WITHIN GROUP (ORDER BY {wait})::bigint,"
        f" percentile_disc(0.95) WITHIN GROUP (ORDER BY {ran})::bigint FROM queues_attempt GROUP BY 1, 2, 3"
    )
    assert found == {tuple(row[:3]): tuple(row[3:]) for row in asked}


def test_a_day_without_rows_is_a_day_without_rows(run: Any, lake: Lake, audit: Audit) -> None:
    assert all(report.rows_in == 0 for report in run(*jobs.JOBS).values())
    audit.add([attempt(), attempt(day=DAY + timedelta(days=2))])
    run("ingest", "attempts", *CHEAP)
    assert sorted(counts(lake, "usage")) == ["2026-03-10", "2026-03-12"]
    run("ingest", "attempts", *CHEAP, since=(DAY + timedelta(days=1)).date(), until=(DAY + timedelta(days=2)).date())
    assert sorted(counts(lake, "usage")) == ["2026-03-10", "2026-03-12"]


@pytest.mark.spec("PIP-4", "A tenant's export holds nothing of another tenant")
def test_an_export_holds_nothing_of_another_tenant(
    run: Any, spark: Any, lake: Lake, audit: Audit, tmp_path: Path
) -> None:
    canary = "CANARY-of-beta-9a1b"
    audit.add([attempt(), dead(error="mine"), dead(tenant_id="beta0002", command=canary, worker=canary, error=canary)])
    run("ingest", "attempts", "failures", "throughput")
    for table in ("attempts", "failures", "throughput"):
        said: list[str] = []
        to = tmp_path / table
        options = type("Options", (), {"table": table, "tenant": "acme0001", "to": str(to)})
        cli.run_export(spark, lake.url, options, said.append)
        frame = spark.read.parquet(str(to))
        assert frame.count() > 0
        assert {row["tenant"] for row in frame.collect()} == {"acme0001"}
        assert not any(canary.encode() in file.read_bytes() for file in to.iterdir())
    # A name is a name, not a condition.
    options = type("Options", (), {"table": "attempts", "tenant": "x' OR 'a'='a", "to": str(tmp_path / "hostile")})
    cli.run_export(spark, lake.url, options, said.append)
    assert spark.read.parquet(str(tmp_path / "hostile")).count() == 0
    assert all("tenant=acme0001" in file for file in files(lake.url, "attempts", tenant="acme0001"))


PLAIN = (
    "id", "concat('00000000-0000-7000-8000-', lpad(hex(id), 12, '0')) AS task_id", "1 AS number", "'c' AS command",
    "0 AS priority", "timestamp_millis(1773100800000 + id) AS created_at", "created_at AS visible_at",
    "created_at AS claimed_at", "timestamp_millis(1773100800000 + id + id % 997) AS ended_at", "'COMPLETED' AS outcome",
    "'COMPLETED' AS status", "'w' AS worker", "'' AS error", "id AS payload_bytes", "id AS result_bytes",
)  # fmt: skip


@pytest.mark.spec("PIP-1", "A tenant with 95 % of the rows costs no more than three times as much")
def test_a_skewed_tenant_costs_little_more_than_a_balanced_one(
    run: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A big partition is spread over files, and so over tasks."""
    monkeypatch.setattr(sinks, "ROWS_PER_FILE", 5_000)
    shares = {"warm": "0", "balanced": "id % 20", "skewed": "if(id % 100 < 95, 0, id % 20)"}

    def seconds(name: str, to: Path) -> float:
        source, into = to / f"{name}-source", Lake(str(to / name))
        rows = spark.range(1000 if name == "warm" else 30_000)
        rows.selectExpr(*PLAIN, f"concat('t', {shares[name]}) AS tenant").write.parquet(str(source))
        run("ingest", files=str(source), lake=into)
        return sum(report.seconds for report in run("attempts", "latency", "usage", lake=into).values())

    took = {name: seconds(name, tmp_path) for name in shares}
    most = max(Lake(str(tmp_path / "skewed")).manifest("attempts").partitions.values(), key=lambda part: part.rows)
    assert most.rows == 28_500
    assert len(most.files) > 1
    if took["skewed"] > 3 * took["balanced"]:  # once more: another program may have had the machine meanwhile
        took = {name: seconds(name, tmp_path / "again") for name in shares}
    assert took["skewed"] <= 3 * took["balanced"], took


def test_a_published_mart_is_the_lakes_and_never_half(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add(mixed(100, random.Random(8)))
    run("ingest", "attempts", "throughput", "failures", "leases", "publish")
    seen = [audit.ask("SELECT sum(attempts) FROM pipeline_throughput")[0][0]]
    audit.add(mixed(100, random.Random(9)))
    with psycopg.connect(audit.dsn) as watching:
        watching.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        assert watching.execute("SELECT sum(attempts) FROM pipeline_throughput").fetchone() == (100,)
        reports = run("ingest", "attempts", "throughput", "publish")
        assert watching.execute("SELECT sum(attempts) FROM pipeline_throughput").fetchone() == (100,)
    assert reports["publish"].partitions > 0
    seen.append(audit.ask("SELECT sum(attempts) FROM pipeline_throughput")[0][0])
    assert seen == [100, 200]
    for mart in schemas.MARTS:
        assert audit.ask(f"SELECT count(*) FROM pipeline_{mart}")[0][0] == lake.manifest(mart).rows
    assert run("publish")["publish"].partitions == 0
    # A mart that somebody emptied is brought back on request.
    with psycopg.connect(audit.dsn) as connection:
        connection.execute("DELETE FROM pipeline_throughput")
    assert run("publish")["publish"].partitions == 0
    run("publish", since=DAY.date())
    assert audit.ask("SELECT sum(attempts) FROM pipeline_throughput")[0][0] == 200


def test_a_row_from_the_future_does_not_close_the_present(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add([attempt(), attempt(DAY.replace(year=2190))])
    run("ingest")
    audit.add([attempt()])
    assert run("ingest", "attempts")["ingest"].late_dropped == 0
    assert counts(lake) == audit.totals()
