"""The drain stores every ended task in PostgreSQL once, even if a process is killed."""

from __future__ import annotations

import gc
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, connections

from codeq_site.devserver.embedded import PostgreSQL
from core import metrics
from core.conf import conf
from core.periodic_lock import PeriodicTaskLock, lock_key
from core.redis.connections import client
from queues import metrics as _queue_metrics  # noqa: F401 - registers its gauges
from queues import periodic_tasks, services
from queues.audit import drain, events, stream
from queues.current_engine import engine
from queues.domain import NewResult, NewTask, Task, TaskStatus
from queues.engine import keys, queries
from queues.models import Attempt, AuditedResult, PeriodicTaskRun, Quarantine
from queues.periodic import SKIPPED
from tenants.domain import TenantSnapshot
from tests.faults.deployment import database_at

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


def partition_of(tenant: TenantSnapshot) -> int:
    return engine().partition_of(tenant.tid)


def enqueue_tasks(tenant: TenantSnapshot, count: int = 1, **fields: Any) -> list[str]:
    new = [NewTask(**{"command": "render", "payload": '{"n":1}', **fields}) for _ in range(count)]
    return [item.task.id for item in services.enqueue(tenant, new).run_sync()]


def claim_tasks(tenant: TenantSnapshot, count: int = 1, worker: str = "w-1") -> list[Task]:
    return services.claim(tenant, ["render"], worker, count=count).run_sync().tasks


def complete_tasks(tenant: TenantSnapshot, count: int = 1, result: bytes = b'{"ok":true}', **fields: Any) -> list[str]:
    """Complete new tasks with a result, and return their ids."""
    enqueue_tasks(tenant, count, **fields)
    tasks = claim_tasks(tenant, count)
    results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=result) for task in tasks]
    assert not [item for item in services.submit(tenant, "w-1", results).run_sync() if isinstance(item, Exception)]
    return [task.id for task in tasks]


def run_drain(**options: Any) -> tuple[int, int]:
    return periodic_tasks.run_drain(lambda: True, **options)


def add_entry(tenant: TenantSnapshot, **fields: object) -> str:
    """Add an entry with these fields, as another release might write it."""
    defaults: dict[str, object] = {
        "id": uuid.uuid4(), "queue": f"{tenant.tid}:render", "attempt": 1, "outcome": "COMPLETED",
        "status": "COMPLETED", "attempts": 0, "priority": 0, "worker": "w-1", "created": 1_760_000_000_000,
        "visible": 1_760_000_000_000, "claimed": 1_760_000_000_000, "ended": 1_760_000_001_000, "error": "",
    }  # fmt: skip
    values = {
        name: str(value) if not isinstance(value, bytes) else value for name, value in (defaults | fields).items()
    }
    return client().xadd(keys.of_partition(partition_of(tenant)).events, values).decode()


@pytest.mark.spec("CLN-3", "An ended task is in the database, and stays there when Redis has removed it")
def test_result_is_stored_and_kept_after_the_task_is_removed(tenant: TenantSnapshot) -> None:
    [task_id] = complete_tasks(tenant, priority=7, webhook=None, trace_parent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert run_drain() == (1, 0)

    services.purge(tenant, [task_id]).run_sync()
    row = AuditedResult.objects.get(pk=task_id)
    assert (row.tenant_id, row.command, row.priority, row.status) == (tenant.tid, "render", 7, "COMPLETED")
    assert (row.payload, row.result, row.error) == ('{"n":1}', '{"ok":true}', "")
    assert (row.worker, row.deliveries, row.attempts, row.max_attempts, row.is_dead) == (
        "w-1",
        1,
        0,
        5,
        False,
    )
    assert row.trace_parent.startswith("00-aaaa")
    assert row.created_at <= row.claimed_at <= row.ended_at
    attempt = Attempt.objects.get(task_id=task_id)
    assert (attempt.number, attempt.outcome, attempt.payload_bytes, attempt.result_bytes) == (
        1,
        "COMPLETED",
        7,
        11,
    )


@pytest.mark.spec("ENQ-4", "Every attempt is stored with its tenant")
def test_every_attempt_is_stored_and_the_row_has_the_last_end(tenant: TenantSnapshot) -> None:
    [task_id] = enqueue_tasks(tenant, max_attempts=2)
    for _ in range(2):
        claim_tasks(tenant)
        services.nack(tenant, task_id, "w-1", delay_seconds=0, reason="no luck").run_sync()
    run_drain()
    dead = AuditedResult.objects.get(pk=task_id)
    assert (dead.status, dead.is_dead, dead.error, dead.deliveries, dead.result) == (
        "FAILED",
        True,
        "no luck",
        2,
        "",
    )

    services.replay(tenant, [task_id]).run_sync()
    claim_tasks(tenant, worker="w-2")
    services.submit(tenant, "w-2", [NewResult(task_id=task_id, status=TaskStatus.COMPLETED, result=b"{}")]).run_sync()
    run_drain()

    row = AuditedResult.objects.get(pk=task_id)
    assert (row.status, row.is_dead, row.worker, row.deliveries, row.result) == (
        "COMPLETED",
        False,
        "w-2",
        3,
        "{}",
    )
    outcomes = Attempt.objects.filter(task_id=task_id).order_by("number").values_list("number", "outcome", "status")
    assert list(outcomes) == [
        (1, "NACKED", "PENDING"),
        (2, "NACKED", "FAILED"),
        (3, "COMPLETED", "COMPLETED"),
    ]


def test_dead_letter_replayed_before_the_drain_does_not_get_the_later_result(tenant: TenantSnapshot) -> None:
    [task_id] = enqueue_tasks(tenant, max_attempts=1)
    claim_tasks(tenant)
    services.nack(tenant, task_id, "w-1", reason="dead").run_sync()
    services.replay(tenant, [task_id]).run_sync()
    claim_tasks(tenant)
    services.submit(tenant, "w-1", [NewResult(task_id=task_id, status=TaskStatus.COMPLETED, result=b"[1]")]).run_sync()

    first, _, second = _read_new(tenant)
    records = [
        events.read(entry, blobs)
        for entry, blobs in zip((first, second), stream.read_blobs([first, second]), strict=True)
    ]
    assert [(record.event.is_dead, record.result) for record in records] == [(True, ""), (False, "[1]")]


def _read_new(tenant: TenantSnapshot) -> list[events.StreamEntry]:
    stream.survey()
    return stream.read({partition_of(tenant): stream.NEW}, 10)


def test_task_cancelled_while_waiting_is_stored_without_an_attempt(tenant: TenantSnapshot) -> None:
    [task_id] = enqueue_tasks(tenant)
    services.cancel(tenant, task_id).run_sync()
    run_drain()
    row = AuditedResult.objects.get(pk=task_id)
    assert (row.status, row.deliveries, row.claimed_at, row.worker) == ("CANCELLED", 0, None, "")
    assert not Attempt.objects.exists()


@pytest.mark.spec("BEA-1", "A second drain of the same entries adds no row and changes no row")
def test_two_drains_over_the_same_entries_write_each_row_once(tenant: TenantSnapshot) -> None:
    """If a lock is lost, both runs read, write and acknowledge the same entries."""
    complete_tasks(tenant, 300)
    stream.survey()
    entries = stream.read({partition_of(tenant): stream.NEW}, 1000)
    batch = list(zip(entries, stream.read_blobs(entries), strict=True))
    barrier, failed = threading.Barrier(3), []

    def overlap() -> None:
        try:
            barrier.wait()
            for at in range(0, len(batch), 50):
                drain.store(batch[at : at + 50])
            stream.acknowledge(entries)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            connections.close_all()

    threads = [threading.Thread(target=overlap) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (AuditedResult.objects.count(), Attempt.objects.count(), Quarantine.objects.count()) == (
        300,
        300,
        0,
    )
    assert stream.lag() == 0


def test_earlier_end_that_is_stored_late_does_not_replace_the_last_end(tenant: TenantSnapshot) -> None:
    task_id = uuid.uuid4()
    add_entry(tenant, id=task_id, attempt=1, outcome="NACKED", status="FAILED", error="dead")
    add_entry(tenant, id=task_id, attempt=2, worker="w-2")
    first, second = [(entry, events.Blobs()) for entry in _read_new(tenant)]
    drain.store([second])
    drain.store([first])
    assert AuditedResult.objects.get(pk=task_id).worker == "w-2"
    assert Attempt.objects.count() == 2


def test_entries_read_by_a_killed_drain_are_stored_by_the_next_drain(tenant: TenantSnapshot) -> None:
    ids = complete_tasks(tenant, 30)
    stream.survey()
    stream.read({partition_of(tenant): stream.NEW}, 10)  # the process is killed here
    assert stream.lag() == 30
    ids += complete_tasks(tenant, 5)
    assert run_drain(chunk=7) == (35, 0)
    assert {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} == set(ids)


def test_batch_with_stored_rows_stores_the_others(tenant: TenantSnapshot) -> None:
    """COPY fails at the first row that exists; the whole batch is then stored in another way."""
    complete_tasks(tenant, 20)
    entries = _read_new(tenant) + _read_new(tenant)
    batch = list(zip(entries, stream.read_blobs(entries), strict=True))
    drain.store(batch[7:9])
    before = dict(AuditedResult.objects.values_list("pk", "ended_at"))
    assert drain.store(batch).quarantined == 0
    assert AuditedResult.objects.count() == Attempt.objects.count() == 20
    assert before.items() <= dict(AuditedResult.objects.values_list("pk", "ended_at")).items()


def test_entries_read_ahead_of_a_failing_database_are_stored_by_the_next_drain(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = complete_tasks(tenant, 40)
    with monkeypatch.context() as patch:
        stored: list[int] = []

        def store(batch: Any) -> drain.StoreResult:
            if stored:
                raise OperationalError("the connection is lost")
            stored.append(len(batch))
            return real_store(batch)

        real_store = drain.store
        patch.setattr(drain, "store", store)
        with pytest.raises(OperationalError):
            run_drain(chunk=10)
    assert gc.isenabled()
    assert (AuditedResult.objects.count(), stream.lag()) == (10, 30)
    assert run_drain(chunk=10) == (30, 0)
    assert {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} == set(ids)
    assert Attempt.objects.count() == 40


def test_large_blobs_are_read_in_several_round_trips(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        complete_tasks(tenant, result=b"%d" % number, payload=f'"{number}{"x" * 1000}"')
    monkeypatch.setattr(queries, "BLOB_BYTES", 1500)  # two tasks
    assert run_drain() == (5, 0)
    assert all(row.payload.startswith(f'"{row.result}x') for row in AuditedResult.objects.all())


def test_stream_is_trimmed_only_up_to_the_last_stored_entry(tenant: TenantSnapshot) -> None:
    complete_tasks(tenant, 10)
    key = keys.of_partition(partition_of(tenant)).events
    entries = _read_new(tenant)
    batch = list(zip(entries, stream.read_blobs(entries), strict=True))
    drain.store(batch[5:])
    stream.acknowledge(entries[5:])
    assert client().xlen(key) == 10
    drain.store(batch[:3])
    stream.acknowledge(entries[:3])
    assert client().xlen(key) == 7
    stream.acknowledge(entries[3:5])
    assert client().xlen(key) == 0


def test_entries_are_kept_for_another_reader_of_the_stream(tenant: TenantSnapshot) -> None:
    key = keys.of_partition(partition_of(tenant)).events
    client().xgroup_create(key, "another-reader", id="0", mkstream=True)
    complete_tasks(tenant, 4)
    run_drain()
    assert stream.lag() == 0
    assert client().xlen(key) == 4


def test_the_watermark_is_the_oldest_entry_that_is_not_stored(tenant: TenantSnapshot) -> None:
    partition = partition_of(tenant)

    def now_ms() -> int:
        seconds, micros = client().time()
        return int(seconds) * 1000 + int(micros) // 1000

    assert abs(stream.drained_until_ms(partition) - now_ms()) < 10_000  # no task has ended
    first = add_entry(tenant)
    add_entry(tenant)
    assert stream.drained_until_ms(partition) == int(first.split("-")[0])  # no drain has run
    entries = _read_new(tenant)
    assert stream.drained_until_ms(partition) == int(first.split("-")[0])  # read, not stored
    stream.acknowledge(entries[:1])
    assert stream.drained_until_ms(partition) == int(entries[1].stream_id.split("-")[0])
    stream.acknowledge(entries[1:])
    third = add_entry(tenant)
    assert stream.drained_until_ms(partition) == int(third.split("-")[0])  # not read
    run_drain()
    assert abs(stream.drained_until_ms(partition) - now_ms()) < 10_000


@pytest.mark.spec("BEA-1", "Any text of a worker is stored; characters that PostgreSQL refuses are escaped")
def test_text_that_postgresql_refuses_is_stored_escaped(tenant: TenantSnapshot) -> None:
    payload = '{"nul":"\\u0000","raw":"\0","lone":"\\ud800","big":1e400,"deep":' + "[" * 6000 + "]" * 6000 + "}"
    results = [b'{"a":"\0"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\\ud800","b":1e100000}', b"\xff\xfe"]
    ids = [complete_tasks(tenant, result=result, payload=payload)[0] for result in results]
    assert run_drain() == (4, 0)
    stored = {str(row.pk): row for row in AuditedResult.objects.all()}
    assert stored[ids[0]].payload == payload.replace("\0", "\\u0000")
    assert [stored[task_id].result for task_id in ids] == [
        '{"a":"\\u0000"}', '{"a":"\\xed\\xa0\\x80"}', '{"a":"\\ud800","b":1e100000}', "\\xff\\xfe",
    ]  # fmt: skip


@pytest.fixture
def _database_refuses_worker_13() -> Iterator[None]:
    """Let PostgreSQL refuse rows of a worker, although their entries are valid."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queues_auditedresult ADD CONSTRAINT unlucky CHECK (worker <> 'w-13')")
        yield
        cursor.execute("ALTER TABLE queues_auditedresult DROP CONSTRAINT IF EXISTS unlucky")


@pytest.mark.spec("BEA-1", "An entry that cannot be stored goes to quarantine and does not stop later ones")
@pytest.mark.usefixtures("_database_refuses_worker_13")
def test_refused_rows_are_isolated_and_all_others_are_stored(
    tenant: TenantSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    good = 0
    for number in range(1000):
        poison = number in (0, 500, 501, 999)
        add_entry(tenant, worker="w-13" if poison else "w-1", error="payload-canary")
        good += not poison
    assert run_drain() == (good, 4)
    assert AuditedResult.objects.count() == Attempt.objects.count() == good
    assert stream.lag() == 0
    assert [("unlucky" in row.reason) for row in Quarantine.objects.all()] == [True] * 4
    assert "payload-canary" not in caplog.text

    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queues_auditedresult DROP CONSTRAINT unlucky")
    assert drain.retry(Quarantine.objects.all()) == 4
    assert (AuditedResult.objects.count(), Quarantine.objects.count()) == (1000, 0)


@pytest.mark.parametrize(
    "broken",
    [
        {"id": "not-a-uuid"},
        {"id": b"\xff\xfe"},
        {"queue": "no-command"},
        {"queue": ":render"},
        {"attempt": "-1"},
        {"attempt": "99999999999"},
        {"priority": "many"},
        {"ended": "1e300"},
        {"ended": "nan"},
        {"ended": "1e999"},
        {"attempt": "inf"},
        {"created": "-5"},
        {"queue": "a-tid-longer-than-any:render"},
    ],
    ids=str,
)
def test_invalid_entry_goes_to_quarantine_with_its_fields(tenant: TenantSnapshot, broken: dict[str, object]) -> None:
    add_entry(tenant)
    add_entry(tenant, **broken)
    add_entry(tenant)
    assert run_drain() == (2, 1)
    row = Quarantine.objects.get()
    assert row.reason
    fields, _ = msgspec.msgpack.decode(bytes(row.raw))
    [(name, value)] = broken.items()
    assert fields[name.encode()] == (value if isinstance(value, bytes) else str(value).encode())


def test_entry_with_an_invalid_spec_goes_to_quarantine(tenant: TenantSnapshot) -> None:
    task_id, other = complete_tasks(tenant, 2)
    client().hset(keys.task(keys.of_partition(partition_of(tenant)).root, task_id), "spec", b"\xc1not msgpack")
    assert run_drain() == (1, 1)
    assert str(AuditedResult.objects.get().pk) == other


def test_entry_of_a_newer_release_is_stored(tenant: TenantSnapshot) -> None:
    add_entry(tenant, region="moon", outcome="EVAPORATED")
    assert run_drain() == (1, 0)
    assert AuditedResult.objects.get().outcome == "EVAPORATED"


def test_task_purged_before_the_drain_is_stored_without_payload(tenant: TenantSnapshot) -> None:
    [task_id] = complete_tasks(tenant)
    services.purge(tenant, [task_id]).run_sync()
    assert run_drain() == (1, 0)
    row = AuditedResult.objects.get(pk=task_id)
    assert (row.status, row.payload, row.result) == ("COMPLETED", "", "")


@pytest.mark.spec("WHK-3", "Handlers of an ended task run in the transaction that stores it, or not at all")
def test_database_error_of_a_handler_quarantines_only_its_entry(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []

    def handler(batch: Any) -> None:
        with connection.cursor() as cursor:
            for item in batch:
                cursor.execute("SELECT 1 / %s", [0 if item.event.worker == "w-13" else 1])
        handled.extend(str(item.event.task_id) for item in batch)

    monkeypatch.setattr(events, "handlers", [handler])
    add_entry(tenant)
    add_entry(tenant, worker="w-13")
    add_entry(tenant)
    assert run_drain() == (2, 1)
    assert sorted(handled) == sorted(str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True))


def test_run_that_lost_its_lock_stops_before_it_writes(tenant: TenantSnapshot) -> None:
    complete_tasks(tenant, 5)
    assert periodic_tasks.run_drain(lambda: False) == (0, 0)
    assert not AuditedResult.objects.exists()
    assert run_drain() == (5, 0)


def test_streams_of_many_tenants_are_drained_completely() -> None:
    tenants = [TenantSnapshot(tid=f"many{number:04}", slug=f"many-{number}") for number in range(12)]
    for number, tenant in enumerate(tenants):
        complete_tasks(tenant, 1 + 3 * number)
    total = sum(1 + 3 * number for number in range(12))
    assert run_drain(chunk=16) == (total, 0)
    assert AuditedResult.objects.count() == total
    assert stream.lag() == 0


@pytest.mark.spec("BEA-1", "A periodic task has one run at a time; the last run is recorded for operators")
def test_second_run_is_skipped_and_the_first_is_recorded(tenant: TenantSnapshot) -> None:
    complete_tasks(tenant)
    lock = PeriodicTaskLock.acquire("queues.drain", 15)
    assert lock
    assert periodic_tasks.drain() == SKIPPED
    assert not AuditedResult.objects.exists()
    lock.release()
    assert periodic_tasks.drain() == "1 stored, 0 in quarantine"
    row = PeriodicTaskRun.objects.get(name="drain")
    assert (row.outcome, row.runs, row.failures, row.every_seconds) == (
        "1 stored, 0 in quarantine",
        1,
        0,
        1.0,
    )
    assert not client().exists(lock_key("queues.drain"))


def test_run_whose_lock_expired_does_not_release_the_lock_of_the_next_run(tenant: TenantSnapshot) -> None:
    lock = PeriodicTaskLock.acquire("queues.drain", 15)
    assert lock
    client().delete(lock_key("queues.drain"))  # as if it had expired
    other = PeriodicTaskLock.acquire("queues.drain", 15)
    assert other
    lock._renewed_at -= 100
    assert not lock.renew()
    lock.release()
    assert client().exists(lock_key("queues.drain"))
    other._renewed_at -= 100
    assert other.renew()


@pytest.mark.spec("BEA-1", "Results are accepted while PostgreSQL is down; afterwards no row is missing or duplicated")
def test_outage_of_postgresql_loses_and_duplicates_no_row(
    tenant: TenantSnapshot, postgres_server: Callable[..., PostgreSQL], caplog: pytest.LogCaptureFixture
) -> None:
    server = postgres_server(fsync="off")
    ids: list[str] = []
    with database_at(server.url):
        call_command("migrate", verbosity=0, skip_checks=True)
        ids += complete_tasks(tenant, 20)
        assert periodic_tasks.drain() == "20 stored, 0 in quarantine"

        server.stop()
        for _ in range(3):
            ids += complete_tasks(tenant, 20)
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                assert periodic_tasks.drain() == "ended early"
                assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert stream.lag() == 60

        server.start()
        ids += complete_tasks(tenant, 20)
        connection.close()
        assert periodic_tasks.drain() == "80 stored, 0 in quarantine"
        assert sorted(str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)) == sorted(ids)
        assert Attempt.objects.count() == len(ids)
        assert stream.lag() == 0


@pytest.mark.spec("OBS-1", "The lag of the audit and the number of quarantined entries are metrics")
def test_lag_and_quarantine_are_scraped(tenant: TenantSnapshot) -> None:
    add_entry(tenant, id="nonsense")
    run_drain()
    complete_tasks(tenant, 3)
    page = metrics.scrape().decode()
    assert "codeq_audit_lag 3.0" in page
    assert "codeq_audit_quarantine 1.0" in page


def test_stream_that_grows_too_long_is_logged(
    tenant: TenantSnapshot, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.CODEQ = {**settings.CODEQ, "queues": {"events_alarm": 2}}
    conf.cache_clear()
    try:
        complete_tasks(tenant, 2)
        run_drain()
        assert "holds" not in caplog.text
        complete_tasks(tenant, 3)
        run_drain()
        assert "an events stream holds 3 entries" in caplog.text
    finally:
        conf.cache_clear()
