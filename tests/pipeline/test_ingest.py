"""The audit reaches the lake whole: every row once, whatever is being written meanwhile, and nothing altered."""

from __future__ import annotations

import threading
from datetime import date, timedelta
from typing import Any

import psycopg
import pytest

from pipeline.spark import schemas, sinks, snapshots, sources
from pipeline.spark.jobs.ingest import AuditTrimmed
from pipeline.spark.lake import Lake
from tests.pipeline.history import DAY, Audit, attempt, counts


def facts(spark: Any, lake: Lake, table: schemas.TableContract = schemas.ATTEMPTS) -> list[dict[str, Any]]:
    manifest = lake.manifest(table.name)
    return [row.asDict() for row in sinks.load(spark, lake, table, manifest, manifest.partitions).collect()]


@pytest.mark.spec("PIP-1", "History goes from the audit into the lake")
def test_a_row_arrives_as_it_was(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    error = 'says "no",\r\n\tthen\\N stops — 日本 🙂, \\x00 ,""'
    odd = attempt("09:30:00.123", error=error, worker="", priority=9, payload_bytes=2**40)
    never = attempt("10:00", number=0, claimed_at=None, outcome="CANCELLED", status="CANCELLED", worker="NULL")
    audit.add([odd, never])
    run("ingest", "attempts")
    by_task = {row["task_id"]: row for row in facts(spark, lake)}
    row = by_task[odd["task_id"]]
    assert {name: row[name] for name in ("error", "worker", "priority", "payload_bytes", "number", "command")} == {
        name: odd[name] for name in ("error", "worker", "priority", "payload_bytes", "number", "command")
    }
    assert (row["date"], row["tenant"], row["wait_ms"], row["run_ms"]) == (date(2026, 3, 10), "acme0001", 1000, 2000)
    cancelled = by_task[never["task_id"]]
    assert (cancelled["claimed_at"], cancelled["wait_ms"], cancelled["run_ms"]) == (None, None, None)
    assert cancelled["worker"] == "NULL"


def test_no_column_holds_a_payload() -> None:
    for table in schemas.TABLES.values():
        assert {"payload", "result", "spec", "body", "answer"}.isdisjoint(table.names)


def test_only_what_is_new_is_read(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add([attempt() for _ in range(5)])
    assert run("ingest")["ingest"].rows_in == 5
    assert run("ingest")["ingest"].rows_in == 0
    audit.add([attempt() for _ in range(3)])
    assert run("ingest", "attempts")["ingest"].rows_in == 3
    assert counts(lake) == {"2026-03-10/acme0001": 8}


def test_ids_are_read_in_partitions_of_one_snapshot(spark: Any, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS_PER_PARTITION", 7)
    audit.add([attempt() for _ in range(40)])
    with snapshots.hold_snapshot(audit.dsn) as moment:
        frame = sources.read(spark, audit.dsn, moment, via="python")
        assert frame.rdd.getNumPartitions() == 6
        # Whoever reads a partition later than this must not see it.
        audit.add([attempt() for _ in range(5)])
        with psycopg.connect(audit.dsn) as other:
            other.execute("DELETE FROM queues_attempt WHERE id % 2 = 0")
        assert frame.count() == 40
        assert frame.count() == 40


@pytest.mark.spec("PIP-2", "An id that is committed late is not skipped")
def test_an_id_that_is_committed_late_is_not_skipped(
    run: Any, lake: Lake, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, rolled_back = psycopg.connect(audit.dsn), psycopg.connect(audit.dsn)
    with late, rolled_back:
        audit.add([attempt() for _ in range(3)])
        audit.add([attempt(tenant_id="late0001") for _ in range(4)], late)
        audit.add([attempt(tenant_id="gone0001") for _ in range(4)], rolled_back)
        audit.add([attempt() for _ in range(3)])
        with snapshots.hold_snapshot(audit.dsn, settle_seconds=0.2) as moment:
            # Two transactions are open below the highest id: nothing is settled yet.
            assert (moment.highest, moment.settled) == (
                max(i for (i,) in audit.ask("SELECT id FROM queues_attempt")),
                0,
            )
        monkeypatch.setattr(snapshots, "SETTLE_SECONDS", 0.2)
        run("ingest", "attempts")
        assert counts(lake) == {"2026-03-10/acme0001": 6}
        late.commit()
        rolled_back.rollback()
    run("ingest", "attempts")
    assert counts(lake) == audit.totals() == {"2026-03-10/acme0001": 6, "2026-03-10/late0001": 4}


def test_without_looking_at_the_writers_late_ids_would_be_lost(audit: Audit) -> None:
    """The race that `settled` is there for: the highest id seen says nothing about the ids below it."""
    with psycopg.connect(audit.dsn) as late:
        audit.add([attempt()], late)
        audit.add([attempt()])
        (naive,) = audit.ask("SELECT max(id) FROM queues_attempt")[0]
        late.commit()
    assert len(audit.ask("SELECT id FROM queues_attempt WHERE id <= %s", naive)) == 2
    assert len(audit.ask("SELECT id FROM queues_attempt WHERE id > %s", naive)) == 0


def test_nothing_is_skipped_under_concurrent_writers(run: Any, lake: Lake, audit: Audit) -> None:
    done = threading.Event()

    def write(name: str) -> None:
        with psycopg.connect(audit.dsn) as connection:
            for number in range(60):
                audit.add([attempt(tenant_id=name) for _ in range(5)], connection)
                if number % 7 == 3:
                    connection.rollback()
                else:
                    connection.commit()
                done.wait(0.01)

    writers = [threading.Thread(target=write, args=(f"writer{i}",)) for i in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        run("ingest")
    done.set()
    run("ingest", "attempts")
    assert counts(lake) == audit.totals()
    assert sum(counts(lake).values()) == 4 * 5 * sum(1 for n in range(60) if n % 7 != 3)


BROKEN: dict[str, dict[str, Any]] = {
    "no ended_at": {"ended_at": "infinity"},
    "no visible_at": {"visible_at": "0044-03-15 00:00:00 BC"},
    "unknown outcome": {"outcome": "EXPLODED"},
    "unknown status": {"status": "?"},
    "ended before it was claimed": {"claimed_at": DAY + timedelta(hours=13)},
    "negative payload_bytes": {"payload_bytes": -1},
    "malformed tenant": {"tenant_id": "../../x"},
}


def test_rows_that_break_the_contract_are_quarantined_and_counted(
    run: Any, spark: Any, lake: Lake, audit: Audit
) -> None:
    audit.add([attempt(), *(attempt() | broken for broken in BROKEN.values()), attempt()])
    report = run("ingest", "attempts")["ingest"]
    assert (report.rows_in, report.rows_out, report.quarantined) == (2 + len(BROKEN), 2, len(BROKEN))
    assert report.notes == tuple(f"1 x {reason}" for reason in sorted(BROKEN))
    assert counts(lake) == {"2026-03-10/acme0001": 2}
    assert sorted(row["reason"] for row in facts(spark, lake, schemas.REJECTED)) == sorted(BROKEN)


def test_a_tenant_is_its_whole_name(run: Any, audit: Audit) -> None:
    """In Java's expressions `$` stands before a last newline, too."""
    audit.add([attempt(tenant_id="acme01\n")])
    assert run("ingest")["ingest"].notes == ("1 x malformed tenant",)


def test_a_table_without_a_column_is_refused_by_name(run: Any, audit: Audit) -> None:
    with psycopg.connect(audit.dsn) as connection:
        connection.execute("ALTER TABLE queues_attempt RENAME COLUMN worker TO done_by")
    try:
        with pytest.raises(schemas.ContractBroken, match="worker"):
            run("ingest")
    finally:
        with psycopg.connect(audit.dsn) as connection:
            connection.execute("ALTER TABLE queues_attempt RENAME COLUMN done_by TO worker")


def test_days_are_read_anew_on_request_and_never_lost_to_a_trimmed_audit(run: Any, lake: Lake, audit: Audit) -> None:
    tomorrow = DAY + timedelta(days=1)
    audit.add([attempt() for _ in range(3)] + [attempt(day=tomorrow) for _ in range(2)])
    run("ingest", "attempts")
    report = run("ingest", since=DAY.date(), until=tomorrow.date())["ingest"]
    assert report.rows_in == 3
    run("attempts")
    assert counts(lake) == audit.totals()
    with psycopg.connect(audit.dsn) as connection:
        connection.execute("DELETE FROM queues_attempt WHERE id = (SELECT min(id) FROM queues_attempt)")
    with pytest.raises(AuditTrimmed, match="2026-03-10/acme0001"):
        run("ingest", since=DAY.date())
    assert counts(lake)["2026-03-10/acme0001"] == 3


def test_a_demand_for_tls_is_never_lost_on_the_way_through_jdbc(
    spark: Any, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would connect without TLS, or to whoever answers, and send the password."""
    audit.add([attempt()])
    monkeypatch.setattr(sources, "has_jdbc", lambda spark: True)
    monkeypatch.setattr(sources, "_read_jdbc", lambda *given: "through JDBC")
    with snapshots.hold_snapshot(audit.dsn) as moment:
        assert sources.read(spark, "host=127.0.0.1 dbname=x user=y password=z", moment) == "through JDBC"
        assert sources.read(spark, f"{audit.dsn} sslmode=prefer", moment).count() == 1
    for more in ("sslmode=verify-full", "sslrootcert=system", "host=/run", "host=a,b", "options=-csearch_path=x"):
        assert not sources.is_plain(f"dbname=x user=y {more}")


def test_the_password_is_in_no_plan(spark: Any, audit: Audit) -> None:
    dsn = f"{audit.dsn} password=hunter2"
    with snapshots.hold_snapshot(dsn) as moment:
        frame = sources.read(spark, dsn, moment, via="python")
        assert "hunter2" not in frame._jdf.queryExecution().toString()
