"""The audit: everything that ended is in PostgreSQL once, in order, whoever died on the way."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.db import connection, connections

from codeq_site.devserver.embedded import PostgreSQL
from core import metrics
from core.conf import conf
from core.periodic_lock import PeriodicTaskLock
from core.redis.connections import client
from core.redis.locks import lock_key
from queues import metrics as _queue_metrics  # noqa: F401 - registers its gauges
from queues import periodic_tasks, services
from queues.audit import drain, events, stream
from queues.current_engine import engine
from queues.domain import NewResult, NewTask, Status, Task
from queues.engine import keys
from queues.models import Attempt, AuditedResult, BeatJob, Quarantine
from queues.periodic import SKIPPED
from tenants.domain import TenantSnapshot
from tests.faults.deployment import database_at

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


def partition(tenant: TenantSnapshot) -> int:
    return engine().partition_of(tenant.tid)


def enqueued(tenant: TenantSnapshot, count: int = 1, **fields: Any) -> list[str]:
    new = [NewTask(**{"command": "render", "payload": '{"n":1}', **fields}) for _ in range(count)]
    return [item.task.id for item in services.enqueue(tenant, new).run_sync()]


def claimed(tenant: TenantSnapshot, count: int = 1, worker: str = "w-1") -> list[Task]:
    return services.claim(tenant, ["render"], worker, count=count).run_sync().tasks


def completed(tenant: TenantSnapshot, count: int = 1, result: bytes = b'{"ok":true}', **fields: Any) -> list[str]:
    """Tasks that a worker ended with a result."""
    enqueued(tenant, count, **fields)
    tasks = claimed(tenant, count)
    results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=result) for task in tasks]
    assert not [item for item in services.submit(tenant, "w-1", results).run_sync() if isinstance(item, Exception)]
    return [task.id for task in tasks]


def drained(**options: Any) -> tuple[int, int]:
    return periodic_tasks.run_drain(lambda: True, **options)


def raw_event(tenant: TenantSnapshot, **fields: object) -> str:
    """An entry as some release, or some accident, might have written it."""
    usual: dict[str, object] = {
        "id": uuid.uuid4(), "queue": f"{tenant.tid}:render", "attempt": 1, "outcome": "COMPLETED",
        "status": "COMPLETED", "attempts": 0, "priority": 0, "worker": "w-1", "created": 1_760_000_000_000,
        "visible": 1_760_000_000_000, "claimed": 1_760_000_000_000, "ended": 1_760_000_001_000, "error": "",
    }  # fmt: skip
    values = {name: str(value) if not isinstance(value, bytes) else value for name, value in (usual | fields).items()}
    return client().xadd(keys.of_partition(partition(tenant)).events, values).decode()


@pytest.mark.spec("CLN-3", "What ended is in the database, and stays there when Redis has let the task go")
def test_a_result_becomes_a_row_that_outlives_the_task(tenant: TenantSnapshot) -> None:
    [task_id] = completed(tenant, priority=7, webhook=None, trace_parent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert drained() == (1, 0)

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


@pytest.mark.spec("ENQ-4", "Audit and tenant are kept with every attempt")
def test_every_attempt_is_a_row_and_the_last_ending_wins(tenant: TenantSnapshot) -> None:
    [task_id] = enqueued(tenant, max_attempts=2)
    for _ in range(2):
        claimed(tenant)
        services.nack(tenant, task_id, "w-1", delay_seconds=0, reason="no luck").run_sync()
    drained()
    dead = AuditedResult.objects.get(pk=task_id)
    assert (dead.status, dead.is_dead, dead.error, dead.deliveries, dead.result) == (
        "FAILED",
        True,
        "no luck",
        2,
        "",
    )

    services.replay(tenant, [task_id]).run_sync()
    claimed(tenant, worker="w-2")
    services.submit(tenant, "w-2", [NewResult(task_id=task_id, status=Status.COMPLETED, result=b"{}")]).run_sync()
    drained()

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


def test_a_dead_letter_that_was_replayed_before_its_audit_does_not_show_its_next_result(
    tenant: TenantSnapshot,
) -> None:
    [task_id] = enqueued(tenant, max_attempts=1)
    claimed(tenant)
    services.nack(tenant, task_id, "w-1", reason="dead").run_sync()
    services.replay(tenant, [task_id]).run_sync()
    claimed(tenant)
    services.submit(tenant, "w-1", [NewResult(task_id=task_id, status=Status.COMPLETED, result=b"[1]")]).run_sync()

    first, _, second = _read_new(tenant)
    seen = [
        events.read(entry, blobs) for entry, blobs in zip((first, second), stream.blobs([first, second]), strict=True)
    ]
    assert [(item.event.is_dead, item.result) for item in seen] == [(True, ""), (False, "[1]")]


def _read_new(tenant: TenantSnapshot) -> list[events.Entry]:
    stream.survey()
    return stream.read({partition(tenant): stream.NEW}, 10)


def test_a_cancelled_waiting_task_is_audited_without_an_attempt(tenant: TenantSnapshot) -> None:
    [task_id] = enqueued(tenant)
    services.cancel(tenant, task_id).run_sync()
    drained()
    row = AuditedResult.objects.get(pk=task_id)
    assert (row.status, row.deliveries, row.claimed_at, row.worker) == ("CANCELLED", 0, None, "")
    assert not Attempt.objects.exists()


@pytest.mark.spec("BEA-1", "A drain that is run again over the same entries adds nothing and changes nothing")
def test_two_drains_over_the_same_entries_write_each_row_once(tenant: TenantSnapshot) -> None:
    """What happens when a lock is lost: both runs read, both write, both acknowledge."""
    completed(tenant, 300)
    stream.survey()
    entries = stream.read({partition(tenant): stream.NEW}, 1000)
    batch = list(zip(entries, stream.blobs(entries), strict=True))
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


def test_an_older_ending_that_is_written_late_does_not_replace_the_last_one(tenant: TenantSnapshot) -> None:
    task_id = uuid.uuid4()
    raw_event(tenant, id=task_id, attempt=1, outcome="NACKED", status="FAILED", error="dead")
    raw_event(tenant, id=task_id, attempt=2, worker="w-2")
    first, second = [(entry, events.Blobs()) for entry in _read_new(tenant)]
    drain.store([second])
    drain.store([first])
    assert AuditedResult.objects.get(pk=task_id).worker == "w-2"
    assert Attempt.objects.count() == 2


def test_what_a_dead_drain_had_read_is_stored_by_the_next_one_first(tenant: TenantSnapshot) -> None:
    ids = completed(tenant, 30)
    stream.survey()
    stream.read({partition(tenant): stream.NEW}, 10)  # and the process dies here
    assert stream.lag() == 30
    ids += completed(tenant, 5)
    assert drained(chunk=7) == (35, 0)
    assert {str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)} == set(ids)


def test_the_stream_is_trimmed_only_behind_what_is_stored(tenant: TenantSnapshot) -> None:
    completed(tenant, 10)
    key = keys.of_partition(partition(tenant)).events
    entries = _read_new(tenant)
    batch = list(zip(entries, stream.blobs(entries), strict=True))
    drain.store(batch[5:])
    stream.acknowledge(entries[5:])
    assert client().xlen(key) == 10
    drain.store(batch[:3])
    stream.acknowledge(entries[:3])
    assert client().xlen(key) == 7
    stream.acknowledge(entries[3:5])
    assert client().xlen(key) == 0


def test_another_reader_of_the_stream_keeps_its_entries(tenant: TenantSnapshot) -> None:
    key = keys.of_partition(partition(tenant)).events
    client().xgroup_create(key, "somebody-else", id="0", mkstream=True)
    completed(tenant, 4)
    drained()
    assert stream.lag() == 0
    assert client().xlen(key) == 4


def test_the_watermark_is_the_oldest_entry_that_is_not_stored(tenant: TenantSnapshot) -> None:
    place = partition(tenant)

    def now_ms() -> int:
        seconds, micros = client().time()
        return int(seconds) * 1000 + int(micros) // 1000

    assert abs(stream.drained_until_ms(place) - now_ms()) < 10_000  # nothing ever ended
    first = raw_event(tenant)
    raw_event(tenant)
    assert stream.drained_until_ms(place) == int(first.split("-")[0])  # no drain ever ran
    entries = _read_new(tenant)
    assert stream.drained_until_ms(place) == int(first.split("-")[0])  # read, not stored
    stream.acknowledge(entries[:1])
    assert stream.drained_until_ms(place) == int(entries[1].stream_id.split("-")[0])
    stream.acknowledge(entries[1:])
    third = raw_event(tenant)
    assert stream.drained_until_ms(place) == int(third.split("-")[0])  # not read
    drained()
    assert abs(stream.drained_until_ms(place) - now_ms()) < 10_000


@pytest.mark.spec("BEA-1", "Whatever a worker sent is stored, escaped where PostgreSQL would refuse it (B-18)")
def test_text_that_postgresql_refuses_is_stored_escaped(tenant: TenantSnapshot) -> None:
    payload = '{"nul":"\\u0000","raw":"\0","lone":"\\ud800","big":1e400,"deep":' + "[" * 6000 + "]" * 6000 + "}"
    results = [b'{"a":"\0"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\\ud800","b":1e100000}', b"\xff\xfe"]
    ids = [completed(tenant, result=result, payload=payload)[0] for result in results]
    assert drained() == (4, 0)
    stored = {str(row.pk): row for row in AuditedResult.objects.all()}
    assert stored[ids[0]].payload == payload.replace("\0", "\\u0000")
    assert [stored[task_id].result for task_id in ids] == [
        '{"a":"\\u0000"}', '{"a":"\\xed\\xa0\\x80"}', '{"a":"\\ud800","b":1e100000}', "\\xff\\xfe",
    ]  # fmt: skip


@pytest.fixture
def _database_refuses_worker_13() -> Iterator[None]:
    """A row that reads well and that PostgreSQL still refuses."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE queues_auditedresult ADD CONSTRAINT unlucky CHECK (worker <> 'w-13')")
        yield
        cursor.execute("ALTER TABLE queues_auditedresult DROP CONSTRAINT IF EXISTS unlucky")


@pytest.mark.spec("BEA-1", "A row that cannot be stored goes to quarantine and stops nobody behind it (B-18)")
@pytest.mark.usefixtures("_database_refuses_worker_13")
def test_a_poison_row_is_isolated_and_the_thousand_behind_it_land(
    tenant: TenantSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    good = 0
    for number in range(1000):
        poison = number in (0, 500, 501, 999)
        raw_event(tenant, worker="w-13" if poison else "w-1", error="payload-canary")
        good += not poison
    assert drained() == (good, 4)
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
        {"created": "-5"},
        {"queue": "a-tid-longer-than-any:render"},
    ],
    ids=str,
)
def test_an_entry_that_makes_no_sense_goes_to_quarantine_and_can_be_read_there(
    tenant: TenantSnapshot, broken: dict[str, object]
) -> None:
    raw_event(tenant)
    raw_event(tenant, **broken)
    raw_event(tenant)
    assert drained() == (2, 1)
    row = Quarantine.objects.get()
    assert row.reason
    fields, _ = msgspec.msgpack.decode(bytes(row.raw))
    [(name, value)] = broken.items()
    assert fields[name.encode()] == (value if isinstance(value, bytes) else str(value).encode())


def test_a_broken_spec_goes_to_quarantine(tenant: TenantSnapshot) -> None:
    task_id, other = completed(tenant, 2)
    client().hset(keys.task(keys.of_partition(partition(tenant)).root, task_id), "spec", b"\xc1not msgpack")
    assert drained() == (1, 1)
    assert str(AuditedResult.objects.get().pk) == other


def test_an_entry_of_a_newer_release_is_stored(tenant: TenantSnapshot) -> None:
    raw_event(tenant, region="moon", outcome="EVAPORATED")
    assert drained() == (1, 0)
    assert AuditedResult.objects.get().outcome == "EVAPORATED"


def test_a_task_purged_before_its_audit_is_still_on_record(tenant: TenantSnapshot) -> None:
    [task_id] = completed(tenant)
    services.purge(tenant, [task_id]).run_sync()
    assert drained() == (1, 0)
    row = AuditedResult.objects.get(pk=task_id)
    assert (row.status, row.payload, row.result) == ("COMPLETED", "", "")


@pytest.mark.spec(
    "WHK-3", "What is to happen with an ended task happens in the transaction that stores it, or not at all"
)
def test_a_handler_that_the_database_refuses_quarantines_its_task_alone(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def handler(batch: Any) -> None:
        with connection.cursor() as cursor:
            for item in batch:
                cursor.execute("SELECT 1 / %s", [0 if item.event.worker == "w-13" else 1])
        heard.extend(str(item.event.task_id) for item in batch)

    monkeypatch.setattr(events, "handlers", [handler])
    raw_event(tenant)
    raw_event(tenant, worker="w-13")
    raw_event(tenant)
    assert drained() == (2, 1)
    assert sorted(heard) == sorted(str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True))


def test_a_run_that_lost_its_turn_stops_before_it_writes(tenant: TenantSnapshot) -> None:
    completed(tenant, 5)
    assert periodic_tasks.run_drain(lambda: False) == (0, 0)
    assert not AuditedResult.objects.exists()
    assert drained() == (5, 0)


def test_many_tenants_are_drained_in_turns_and_none_is_left_out() -> None:
    tenants = [TenantSnapshot(tid=f"many{number:04}", slug=f"many-{number}") for number in range(12)]
    for number, each in enumerate(tenants):
        completed(each, 1 + 3 * number)
    total = sum(1 + 3 * number for number in range(12))
    assert drained(chunk=16) == (total, 0)
    assert AuditedResult.objects.count() == total
    assert stream.lag() == 0


@pytest.mark.spec("BEA-1", "One run of a job at a time, and the last one on record for operators")
def test_a_second_run_leaves_at_once_and_the_first_is_on_record(tenant: TenantSnapshot) -> None:
    completed(tenant)
    turn = PeriodicTaskLock.acquire("queues.drain", 15)
    assert turn
    assert periodic_tasks.drain() == SKIPPED
    assert not AuditedResult.objects.exists()
    turn.release()
    assert periodic_tasks.drain() == "1 stored, 0 in quarantine"
    row = BeatJob.objects.get(name="drain")
    assert (row.outcome, row.runs, row.failures, row.every_seconds) == (
        "1 stored, 0 in quarantine",
        1,
        0,
        1.0,
    )
    assert not client().exists(lock_key("queues.drain"))


def test_a_frozen_run_that_wakes_up_after_its_lock_notices_and_takes_nobody_elses(tenant: TenantSnapshot) -> None:
    """A process stopped past its lock: the lock is gone, then somebody else's."""
    turn = PeriodicTaskLock.acquire("queues.drain", 15)
    assert turn
    client().delete(lock_key("queues.drain"))  # what its time-out does
    other = PeriodicTaskLock.acquire("queues.drain", 15)
    assert other
    turn._renewed_at -= 100
    assert not turn.renew()
    turn.release()
    assert client().exists(lock_key("queues.drain"))
    other._renewed_at -= 100
    assert other.renew()


@pytest.mark.spec(
    "BEA-1", "With PostgreSQL stopped results go on; when it is back nothing is missing or doubled (B-17)"
)
def test_postgresql_away_and_back_loses_and_doubles_nothing(
    tenant: TenantSnapshot, postgres_server: Callable[..., PostgreSQL], caplog: pytest.LogCaptureFixture
) -> None:
    server = postgres_server(fsync="off")
    ids: list[str] = []
    with database_at(server.url):
        call_command("migrate", verbosity=0, skip_checks=True)
        ids += completed(tenant, 20)
        assert periodic_tasks.drain() == "20 stored, 0 in quarantine"

        server.stop()
        for _ in range(3):
            ids += completed(tenant, 20)
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                assert periodic_tasks.drain() == "ended early"
                assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert stream.lag() == 60

        server.start()
        ids += completed(tenant, 20)
        connection.close()
        assert periodic_tasks.drain() == "80 stored, 0 in quarantine"
        assert sorted(str(pk) for pk in AuditedResult.objects.values_list("pk", flat=True)) == sorted(ids)
        assert Attempt.objects.count() == len(ids)
        assert stream.lag() == 0


@pytest.mark.spec("OBS-1", "How far the audit is behind and what it could not store are metrics")
def test_lag_and_quarantine_are_scraped(tenant: TenantSnapshot) -> None:
    raw_event(tenant, id="nonsense")
    drained()
    completed(tenant, 3)
    shown = metrics.scrape().decode()
    assert "codeq_audit_lag 3.0" in shown
    assert "codeq_audit_quarantine 1.0" in shown


def test_a_stream_that_grows_too_long_is_said_aloud(
    tenant: TenantSnapshot, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.CODEQ = {**settings.CODEQ, "queues": {"events_alarm": 2}}
    conf.cache_clear()
    try:
        completed(tenant, 2)
        drained()
        assert "holds" not in caplog.text
        completed(tenant, 3)
        drained()
        assert "an events stream holds 3 entries" in caplog.text
    finally:
        conf.cache_clear()
