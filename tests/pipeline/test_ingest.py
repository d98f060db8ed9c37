"""Ingest copies every audit row once and unchanged, even with concurrent writers."""

from __future__ import annotations

import threading
from datetime import date, timedelta
from typing import Any

import psycopg
import pytest

from pipeline.spark import schemas, sinks, snapshots, sources
from pipeline.spark.jobs.ingest import AuditTrimmed
from pipeline.spark.lake import Lake
from tests.pipeline.history import DAY, Audit, build_attempt, count_rows


def read_table(spark: Any, lake: Lake, table: schemas.TableContract = schemas.ATTEMPTS) -> list[dict[str, Any]]:
    manifest = lake.manifest(table.name)
    return [row.asDict() for row in sinks.load(spark, lake, table, manifest, manifest.partitions).collect()]


@pytest.mark.spec("PIP-1", "History is copied from the audit to the lake")
def test_row_is_copied_unchanged(run: Any, spark: Any, lake: Lake, audit: Audit) -> None:
    error = 'says "no",\r\n\tthen\\N stops — 日本 🙂, \\x00 ,""'
    unusual = build_attempt("09:30:00.123", error=error, worker="", priority=9, payload_bytes=2**40)
    unclaimed = build_attempt(
        "10:00", number=0, claimed_at=None, outcome="CANCELLED", status="CANCELLED", worker="NULL"
    )
    audit.add([unusual, unclaimed])
    run("ingest", "attempts")
    by_task = {row["task_id"]: row for row in read_table(spark, lake)}
    row = by_task[unusual["task_id"]]
    assert {name: row[name] for name in ("error", "worker", "priority", "payload_bytes", "number", "command")} == {
        name: unusual[name] for name in ("error", "worker", "priority", "payload_bytes", "number", "command")
    }
    assert (row["date"], row["tenant"], row["wait_ms"], row["run_ms"]) == (date(2026, 3, 10), "acme0001", 1000, 2000)
    cancelled = by_task[unclaimed["task_id"]]
    assert (cancelled["claimed_at"], cancelled["wait_ms"], cancelled["run_ms"]) == (None, None, None)
    assert cancelled["worker"] == "NULL"


def test_no_column_holds_a_payload() -> None:
    for table in schemas.TABLES.values():
        assert {"payload", "result", "spec", "body", "answer"}.isdisjoint(table.names)


def test_only_new_rows_are_read(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add([build_attempt() for _ in range(5)])
    assert run("ingest")["ingest"].rows_in == 5
    assert run("ingest")["ingest"].rows_in == 0
    audit.add([build_attempt() for _ in range(3)])
    assert run("ingest", "attempts")["ingest"].rows_in == 3
    assert count_rows(lake) == {"2026-03-10/acme0001": 8}


def test_ids_are_read_in_partitions_of_one_snapshot(spark: Any, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS_PER_PARTITION", 7)
    audit.add([build_attempt() for _ in range(40)])
    with snapshots.hold_snapshot(audit.dsn) as snapshot:
        frame = sources.read(spark, audit.dsn, snapshot, via="python")
        assert frame.rdd.getNumPartitions() == 6
        # Partitions that are read after these changes must not see them.
        audit.add([build_attempt() for _ in range(5)])
        with psycopg.connect(audit.dsn) as connection:
            connection.execute("DELETE FROM queues_attempt WHERE id % 2 = 0")
        assert frame.count() == 40
        assert frame.count() == 40


@pytest.mark.spec("PIP-2", "A row that is committed late is not skipped")
def test_row_committed_late_is_not_skipped(run: Any, lake: Lake, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    late, rolled_back = psycopg.connect(audit.dsn), psycopg.connect(audit.dsn)
    with late, rolled_back:
        audit.add([build_attempt() for _ in range(3)])
        audit.add([build_attempt(tenant_id="late0001") for _ in range(4)], late)
        audit.add([build_attempt(tenant_id="gone0001") for _ in range(4)], rolled_back)
        audit.add([build_attempt() for _ in range(3)])
        with snapshots.hold_snapshot(audit.dsn, settle_seconds=0.2) as snapshot:
            # Two transactions with lower ids are still open, so nothing is settled yet.
            assert (snapshot.highest, snapshot.settled) == (
                max(i for (i,) in audit.query("SELECT id FROM queues_attempt")),
                0,
            )
        monkeypatch.setattr(snapshots, "SETTLE_SECONDS", 0.2)
        run("ingest", "attempts")
        assert count_rows(lake) == {"2026-03-10/acme0001": 6}
        late.commit()
        rolled_back.rollback()
    run("ingest", "attempts")
    assert count_rows(lake) == audit.count_per_partition() == {"2026-03-10/acme0001": 6, "2026-03-10/late0001": 4}


def test_without_waiting_for_writers_late_rows_would_be_lost(audit: Audit) -> None:
    """Show the race that `settled` prevents: rows with lower ids may still be uncommitted."""
    with psycopg.connect(audit.dsn) as late:
        audit.add([build_attempt()], late)
        audit.add([build_attempt()])
        (highest_visible,) = audit.query("SELECT max(id) FROM queues_attempt")[0]
        late.commit()
    assert len(audit.query("SELECT id FROM queues_attempt WHERE id <= %s", highest_visible)) == 2
    assert len(audit.query("SELECT id FROM queues_attempt WHERE id > %s", highest_visible)) == 0


def test_no_row_is_skipped_with_concurrent_writers(run: Any, lake: Lake, audit: Audit) -> None:
    done = threading.Event()

    def write(name: str) -> None:
        with psycopg.connect(audit.dsn) as connection:
            for number in range(60):
                audit.add([build_attempt(tenant_id=name) for _ in range(5)], connection)
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
    assert count_rows(lake) == audit.count_per_partition()
    assert sum(count_rows(lake).values()) == 4 * 5 * sum(1 for n in range(60) if n % 7 != 3)


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
    audit.add([build_attempt(), *(build_attempt() | broken for broken in BROKEN.values()), build_attempt()])
    report = run("ingest", "attempts")["ingest"]
    assert (report.rows_in, report.rows_out, report.quarantined) == (2 + len(BROKEN), 2, len(BROKEN))
    assert report.notes == tuple(f"1 x {reason}" for reason in sorted(BROKEN))
    assert count_rows(lake) == {"2026-03-10/acme0001": 2}
    assert sorted(row["reason"] for row in read_table(spark, lake, schemas.REJECTED)) == sorted(BROKEN)


def test_tenant_with_a_trailing_newline_is_malformed(run: Any, audit: Audit) -> None:
    """In Java's regular expressions, `$` also matches before a final newline."""
    audit.add([build_attempt(tenant_id="acme01\n")])
    assert run("ingest")["ingest"].notes == ("1 x malformed tenant",)


def test_missing_column_of_the_table_is_named_in_the_error(run: Any, audit: Audit) -> None:
    with psycopg.connect(audit.dsn) as connection:
        connection.execute("ALTER TABLE queues_attempt RENAME COLUMN worker TO done_by")
    try:
        with pytest.raises(schemas.ContractBroken, match="worker"):
            run("ingest")
    finally:
        with psycopg.connect(audit.dsn) as connection:
            connection.execute("ALTER TABLE queues_attempt RENAME COLUMN done_by TO worker")


def test_days_are_read_again_on_request_unless_the_audit_was_trimmed(run: Any, lake: Lake, audit: Audit) -> None:
    tomorrow = DAY + timedelta(days=1)
    audit.add([build_attempt() for _ in range(3)] + [build_attempt(day=tomorrow) for _ in range(2)])
    run("ingest", "attempts")
    report = run("ingest", since=DAY.date(), until=tomorrow.date())["ingest"]
    assert report.rows_in == 3
    run("attempts")
    assert count_rows(lake) == audit.count_per_partition()
    with psycopg.connect(audit.dsn) as connection:
        connection.execute("DELETE FROM queues_attempt WHERE id = (SELECT min(id) FROM queues_attempt)")
    with pytest.raises(AuditTrimmed, match="2026-03-10/acme0001"):
        run("ingest", since=DAY.date())
    assert count_rows(lake)["2026-03-10/acme0001"] == 3


def test_jdbc_is_not_used_if_the_dsn_requires_tls(spark: Any, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would send the password without TLS, or to an unverified server."""
    audit.add([build_attempt()])
    monkeypatch.setattr(sources, "has_jdbc", lambda spark: True)
    monkeypatch.setattr(sources, "_read_jdbc", lambda *args: "through JDBC")
    with snapshots.hold_snapshot(audit.dsn) as snapshot:
        assert sources.read(spark, "host=127.0.0.1 dbname=x user=y password=z", snapshot) == "through JDBC"
        assert sources.read(spark, f"{audit.dsn} sslmode=prefer", snapshot).count() == 1
    for parameter in ("sslmode=verify-full", "sslrootcert=system", "host=/run", "host=a,b", "options=-csearch_path=x"):
        assert not sources.is_jdbc_compatible(f"dbname=x user=y {parameter}")


def test_password_is_not_in_the_query_plan(spark: Any, audit: Audit) -> None:
    dsn = f"{audit.dsn} password=hunter2"
    with snapshots.hold_snapshot(dsn) as snapshot:
        frame = sources.read(spark, dsn, snapshot, via="python")
        assert "hunter2" not in frame._jdf.queryExecution().toString()
