"""Bulk jobs: each task done once and counted once, whatever is killed; dry run, rate, canaries, cancel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from codeq_site.celery import app
from core import errors
from core.redis.connections import client
from queues import periodic_tasks, selectors, services
from queues.current_engine import engine
from queues.deadletters import bulk_jobs, bulk_runner, queries
from queues.deadletters.bulk_jobs import Canary
from queues.deadletters.queries import Filter
from queues.domain import NewResult, NewTask, Status
from queues.engine import keys
from queues.models import AuditedResult, BulkItem, BulkJob
from queues.search import pagination
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)
RENDER = Filter(command="render")


@pytest.fixture(autouse=True)
def _no_follower() -> Iterator[None]:
    """The directory's thread would hold the test database open."""
    yield
    tenant_cache.stop()


def dead(tenant: TenantSnapshot, count: int, *, command: str = "render", reason: str = "boom") -> list[str]:
    """Dead letters that the audit knows of."""
    ids: list[str] = []
    while len(ids) < count:
        new = [
            NewTask(command=command, payload=f'{{"n":{n}}}', max_attempts=1) for n in range(min(500, count - len(ids)))
        ]
        services.enqueue(tenant, new).run_sync()
        ids += die(tenant, command=command, reason=reason)
    periodic_tasks.run_drain(lambda: True)
    return ids


def die(tenant: TenantSnapshot, *, command: str = "render", reason: str = "boom") -> list[str]:
    """Everything that waits is claimed, and dies."""
    ids = []
    while tasks := services.claim(tenant, [command], "w", count=1000).run_sync().tasks:
        ids += [task.id for task in tasks]
        for task in tasks:
            services.nack(tenant, task.id, "w", reason=reason, delay_seconds=0).run_sync()
    return ids


def start(tenant: TenantSnapshot, which: Any = RENDER, kind: str = "replay", **asked: Any) -> BulkJob:
    return bulk_jobs.start(tenant, kind, which, actor="root", **asked)


def finished(job: BulkJob) -> BulkJob:
    """The job when nothing can be done about it any more."""
    for _ in range(10_000):
        job.refresh_from_db()
        if job.state not in ("running", "cancelling"):
            return job
        bulk_runner.step(job.pk)
    raise AssertionError("the job does not come to an end")


def stats(tenant: TenantSnapshot, command: str = "render") -> tuple[int, int]:
    found = selectors.queue_stats(tenant, command).run_sync()
    return found.ready, found.dlq


def counts(job: BulkJob) -> tuple[int, int, int]:
    return job.done, job.skipped, job.failed


@pytest.mark.spec("ADM-2", "All dead letters that match are replayed as a job with progress, the oldest first")
def test_everything_that_matches_is_replayed_in_its_old_order(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_runner, "PIECE", 100)
    ids = dead(tenant, 450)
    others = dead(tenant, 3, command="mail")
    job = start(tenant, reason="the gateway is back")
    progress = []
    while not job.is_over:
        bulk_runner.step(job.pk)
        job.refresh_from_db()
        progress.append(job.done)
    assert (job.state, job.total, counts(job)) == ("done", 450, (450, 0, 0))
    assert progress == sorted(progress)
    assert len(set(progress)) >= 3
    assert (job.actor, job.reason) == ("root", "the gateway is back")
    assert (stats(tenant), stats(tenant, "mail")) == ((450, 0), (0, 3))
    taken = [task.id for task in services.claim(tenant, ["render"], "w", count=450).run_sync().tasks]
    assert taken == ids
    periodic_tasks.run_drain(lambda: True)
    assert [letter.id for letter in queries.page([tenant.tid], Filter()).letters] == others[::-1]


def test_beat_carries_all_jobs_on_until_they_are_done(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    dead(tenant, 30)
    dead(other_tenant, 20)
    jobs = [start(tenant), start(other_tenant)]
    assert periodic_tasks.carry_on() == "50 dealt with"
    assert [finished(job).state for job in jobs] == ["done", "done"]
    assert (stats(tenant), stats(other_tenant)) == ((30, 0), (20, 0))
    assert periodic_tasks.carry_on() == "0 dealt with"


@pytest.mark.spec("ADM-2", "Selected dead letters are replayed; what lives already is skipped, what is gone is told")
def test_named_tasks_are_replayed_and_the_others_are_told(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    replayed_before, gone, *rest = dead(tenant, 6)
    [foreign] = dead(other_tenant, 1)
    queries.replay(tenant, [replayed_before])
    queries.delete(tenant, [gone])
    job = finished(start(tenant, [replayed_before, gone, foreign, *rest[:3], rest[0]]))
    assert (job.state, job.total, counts(job)) == ("done", 6, (3, 1, 2))
    wrong = {str(item.task_id): (item.outcome, item.error) for item in bulk_jobs.items(job) if item.error}
    assert wrong == {
        replayed_before: ("skipped", "not_dead"),
        gone: ("failed", "task_not_found"),
        foreign: ("failed", "task_not_found"),
    }
    assert bulk_jobs.items(job, outcome="done").count() == 3
    assert (stats(tenant), stats(other_tenant)) == ((4, 1), (0, 1))


@pytest.mark.spec(
    "ADM-2", "All dead letters that match are deleted as a job; what was replayed meanwhile is left alone"
)
def test_everything_that_matches_is_deleted(tenant: TenantSnapshot) -> None:
    first, second, *rest = dead(tenant, 5)
    job = start(tenant, kind="delete")
    bulk_runner.step(job.pk)  # the piece is chosen, and not yet sent
    services.replay(tenant, [first]).run_sync()
    services.purge(tenant, [second]).run_sync()
    finished(job)
    assert (job.state, counts(job)) == ("done", (4, 1, 0))
    assert stats(tenant) == (1, 0)
    periodic_tasks.run_drain(lambda: True)
    assert queries.page([tenant.tid], Filter()).letters == []
    assert AuditedResult.objects.filter(pk__in=rest).count() == 3


def test_a_dry_run_counts_and_shows_and_changes_nothing(tenant: TenantSnapshot) -> None:
    ids = dead(tenant, 25)
    dead(tenant, 2, reason="other")
    found = bulk_jobs.dry_run(tenant, Filter(error="boom"))
    assert (found.count, len(found.sample)) == (25, bulk_jobs.SAMPLE)
    assert {letter.id for letter in found.sample} <= set(ids)
    assert stats(tenant) == (0, 27)
    assert not BulkJob.objects.exists()


@pytest.mark.spec("ADM-2", "What dies after a job was asked for is not part of it: no job replays its own failures")
def test_a_poison_task_is_replayed_once_by_a_job(tenant: TenantSnapshot) -> None:
    ids = dead(tenant, 300)
    job = start(tenant)
    for _ in range(2):
        bulk_runner.step(job.pk)
    assert len(die(tenant)) == 250
    periodic_tasks.run_drain(lambda: True)
    finished(job)
    assert counts(job) == (300, 0, 0)
    assert stats(tenant) == (50, 250)
    assert finished(start(tenant)).done == 250
    assert sorted(die(tenant)) == sorted(ids)


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool) -> None:
    """The next call of it is the last thing that happens: before it, or after it."""
    real, over = getattr(bulk_runner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs) if after or over else None
        if not over:
            over.append(1)
            raise RuntimeError("killed")
        return result

    monkeypatch.setattr(bulk_runner, name, broken)


@pytest.mark.spec("ADM-2", "A job that dies anywhere goes on: each item is done once and counted once")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", ["_send", "_book", "_choose", "_unmark"])
@pytest.mark.parametrize("drained", [False, True], ids=["the audit is behind", "the audit is there"])
@pytest.mark.parametrize("kind", ["replay", "delete"])
def test_a_job_that_dies_goes_on_where_it_was(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch, place: str, after: bool, drained: bool, kind: str
) -> None:
    monkeypatch.setattr(bulk_runner, "PIECE", 10)
    dead(tenant, 35)
    job = start(tenant, kind=kind)
    bulk_runner.step(job.pk)
    fail_at(monkeypatch, place, after=after)
    with pytest.raises(RuntimeError):
        bulk_runner.step(job.pk)
    if drained:
        periodic_tasks.run_drain(lambda: True)
    finished(job)
    assert (job.state, counts(job)) == ("done", (35, 0, 0))
    assert stats(tenant) == ((35, 0) if kind == "replay" else (0, 0))
    # Each was told of once.
    entries = client().xrange(keys.of_partition(engine().partition_of(tenant.tid)).events)
    kept = AuditedResult.objects.filter(is_dead=True).count()
    periodic_tasks.run_drain(lambda: True)
    assert AuditedResult.objects.filter(is_dead=True).count() <= kept
    told = [fields[b"id"] for _, fields in entries if fields[b"outcome"] in (b"REPLAYED", b"PURGED")]
    assert len(told) == len(set(told))


def test_a_task_that_died_again_before_its_piece_was_sent_again_is_not_replayed_twice(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a script must know the job: to a second asking, a task that has died since looks like one never replayed."""
    dead(tenant, 5)
    job = start(tenant)
    bulk_runner.step(job.pk)
    fail_at(monkeypatch, "_send", after=True)
    with pytest.raises(RuntimeError):
        bulk_runner.step(job.pk)
    assert len(die(tenant)) == 5
    finished(job)
    assert counts(job) == (5, 0, 0)
    assert stats(tenant) == (0, 5)


def test_two_processes_at_one_job_count_each_task_once(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was frozen wakes up and goes on with a piece that another one has sent meanwhile."""
    dead(tenant, 30)
    monkeypatch.setattr(bulk_runner, "PIECE", 10)
    job = start(tenant)
    bulk_runner.step(job.pk)
    real = bulk_runner._send

    def frozen(held: BulkJob) -> bulk_runner.Answers:
        monkeypatch.setattr(bulk_runner, "_send", real)
        bulk_runner.step(job.pk)
        return real(held)

    monkeypatch.setattr(bulk_runner, "_send", frozen)
    assert bulk_runner.step(job.pk) == 0
    job.refresh_from_db()
    assert job.done == 10
    finished(job)
    assert (counts(job), stats(tenant)) == ((30, 0, 0), (30, 0))


@pytest.mark.real_time
@pytest.mark.spec("ADM-2", "A bulk replay killed by SIGKILL continues, each item done exactly once (A-9)")
def test_a_killed_worker_leaves_nothing_undone_and_nothing_done_twice(tenant: TenantSnapshot) -> None:
    count = 3_000
    dead(tenant, count)
    job = start(tenant, rate_per_second=1_500)
    database = connection.settings_dict
    url = f"postgresql://postgres@/{database['NAME']}?host={database['OPTIONS'].get('host') or database['HOST']}"
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "codeq_site.settings"}
    code = "import django; django.setup(); from queues.deadletters import bulk_runner; bulk_runner.run(lambda: True, seconds=60)"
    kills = 0
    try:
        while job.state == "running":
            worker = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=settings.BASE_DIR)
            before = job.handled

            def moved(before: int = before) -> bool:
                job.refresh_from_db()
                return job.is_over or job.handled >= before + 500

            until(moved, 60, every=0.001)
            worker.send_signal(signal.SIGKILL)
            worker.wait(10)
            kills += 1
            job.refresh_from_db()
    finally:
        worker.kill()
        worker.wait(10)
    assert kills >= 3
    assert (job.state, counts(job)) == ("done", (count, 0, 0))
    assert stats(tenant) == (count, 0)
    taken = [task.id for _ in range(3) for task in services.claim(tenant, ["render"], "w", count=1000).run_sync().tasks]
    assert len(set(taken)) == len(taken) == count


@pytest.mark.spec("ADM-2", "A job keeps its rate")
def test_a_job_keeps_its_rate(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    dead(tenant, 120)
    now = datetime.now(UTC)
    monkeypatch.setattr(bulk_runner, "_now", lambda: now)
    job = start(tenant, rate_per_second=50)
    sent = []
    for _ in range(40):
        bulk_runner.step(job.pk)
        bulk_runner.step(job.pk)
        job.refresh_from_db()
        sent.append(job.handled + len(job.sending))
        now += timedelta(seconds=0.1)
    assert sent[-1] == 120
    for tenth, number in enumerate(sent):
        # What a second brings may be sent at once, and not in crumbs.
        assert min(120, 5 * tenth - 2) <= number <= 50 + 5 * tenth


def test_a_pause_is_no_credit(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    dead(tenant, 100)
    now = datetime.now(UTC)
    monkeypatch.setattr(bulk_runner, "_now", lambda: now)
    job = start(tenant, rate_per_second=10)
    bulk_runner.step(job.pk)
    now += timedelta(hours=1)
    for _ in range(5):
        bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.handled + len(job.sending) == 20


@pytest.fixture
def watched(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BulkJob]:
    """A job that has sent its canaries and looks after them."""

    def make(**canary: Any) -> BulkJob:
        dead(tenant, 50)
        job = start(tenant, canary=Canary(**({"count": 10, "percent": 20, "seconds": 30} | canary)))
        for _ in range(3):
            bulk_runner.step(job.pk)
        job.refresh_from_db()
        assert (job.state, job.done) == ("watching", 10)
        return job

    return make


def some_die(tenant: TenantSnapshot, count: int) -> None:
    tasks = services.claim(tenant, ["render"], "w", count=10).run_sync().tasks
    assert len(tasks) == 10
    for task in tasks[:count]:
        services.nack(tenant, task.id, "w").run_sync()
    results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"{}") for task in tasks[count:]]
    if results:
        services.submit(tenant, "w", results).run_sync()
    periodic_tasks.run_drain(lambda: True)


@pytest.mark.spec("ADM-2", "Canaries go first; if too many of them die again, the rest stays where it is")
def test_the_rest_stays_dead_when_too_many_canaries_die(
    tenant: TenantSnapshot, watched: Callable[..., BulkJob]
) -> None:
    job = watched()
    some_die(tenant, 3)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert (job.state, job.canaries_died, counts(job)) == ("stopped", 3, (10, 0, 0))
    assert job.is_over
    assert bulk_jobs.items(job).filter(is_canary=True).count() == 10
    assert stats(tenant) == (0, 43)
    assert bulk_runner.run(lambda: True) == 0


def test_the_rest_follows_when_the_canaries_live(
    tenant: TenantSnapshot, watched: Callable[..., BulkJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = watched()
    some_die(tenant, 2)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "watching"  # few enough have died, and their time is not over
    later = datetime.now(UTC) + timedelta(seconds=31)
    monkeypatch.setattr(bulk_runner, "_now", lambda: later)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "watching"  # the audit cannot have heard of all that happened until then
    BulkJob.objects.update(watched_until=datetime.now(UTC) - timedelta(seconds=1))
    bulk_runner.step(job.pk)
    finished(job)
    assert (job.state, job.canaries_died, counts(job)) == ("done", 2, (50, 0, 0))


def test_canaries_that_the_audit_has_not_heard_of_are_waited_for(
    tenant: TenantSnapshot, watched: Callable[..., BulkJob]
) -> None:
    job = watched(seconds=0)
    some_die(tenant, 0)
    # They end while PostgreSQL is away from the drain.
    [waiting] = [services.enqueue(tenant, [NewTask(command="mail", payload="1", max_attempts=1)]).run_sync()[0]]
    services.claim(tenant, ["mail"], "w").run_sync()
    services.nack(tenant, waiting.task.id, "w").run_sync()
    BulkJob.objects.update(watched_until=datetime.now(UTC) + timedelta(milliseconds=50))
    time.sleep(0.06)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "watching"
    periodic_tasks.run_drain(lambda: True)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "running"


@pytest.mark.spec("ADM-2", "A job is cancelled: nothing more is chosen, and what was on its way is counted")
def test_a_cancelled_job_does_no_more(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_runner, "PIECE", 10)
    dead(tenant, 50)
    job = start(tenant)
    bulk_runner.step(job.pk)
    bulk_runner.step(job.pk)
    assert bulk_jobs.cancel([tenant.tid], str(job.pk)).state == "cancelling"
    finished(job)
    assert (job.state, job.is_over, counts(job)) == ("cancelled", True, (20, 0, 0))
    assert stats(tenant) == (20, 30)
    assert bulk_jobs.cancel([tenant.tid], str(job.pk)).state == "cancelled"
    done = finished(start(tenant))
    assert bulk_jobs.cancel([tenant.tid], str(done.pk)).state == "done"


def test_a_job_that_has_not_begun_is_cancelled_at_once(tenant: TenantSnapshot) -> None:
    dead(tenant, 5)
    job = start(tenant)
    assert bulk_jobs.cancel([tenant.tid], str(job.pk)).state == "cancelled"
    assert bulk_runner.run(lambda: True) == 0
    assert stats(tenant) == (0, 5)


@pytest.mark.spec("TEN-3", "A tenant's jobs reach its own dead letters only, and only it sees and cancels them")
def test_nobody_reaches_another_tenants_jobs_or_letters(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    dead(tenant, 5)
    theirs = dead(other_tenant, 5)
    job = start(tenant, Filter())
    for reach in (bulk_jobs.find, bulk_jobs.cancel):
        with pytest.raises(errors.NotFound):
            reach([other_tenant.tid], str(job.pk))
        with pytest.raises(errors.NotFound):
            reach([tenant.tid], str(uuid.uuid4()))
        with pytest.raises(errors.NotFound):
            reach([tenant.tid], "nonsense")
    assert list(bulk_jobs.of([other_tenant.tid])) == []
    assert list(bulk_jobs.of(None)) == [job]
    finished(job)
    assert counts(finished(start(tenant, theirs, kind="delete"))) == (5, 0, 0)  # gone, for all that they know
    assert (stats(tenant), stats(other_tenant)) == ((5, 0), (0, 5))
    assert len(queries.page([other_tenant.tid], Filter()).letters) == 5


@pytest.mark.parametrize(
    ("which", "asked"),
    [
        ([], {}),
        (["x"], {}),
        ([str(uuid.UUID(int=7))] * (bulk_jobs.IDS + 1), {}),
        (Filter(text="-"), {}),
        (Filter(json_path="$["), {}),
        (RENDER, {"rate_per_second": 0}),
        (RENDER, {"canary": Canary(count=-1)}),
        (RENDER, {"canary": Canary(count=bulk_jobs.CANARIES + 1)}),
        (RENDER, {"canary": Canary(count=1, percent=101)}),
        (RENDER, {"canary": Canary(count=1), "kind": "delete"}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_job_that_cannot_be_is_refused(tenant: TenantSnapshot, which: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        start(tenant, which, **asked)
    assert not BulkJob.objects.exists()


def test_a_tenant_has_so_many_jobs_under_way_and_no_more(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    for _ in range(bulk_jobs.JOBS):
        start(tenant)
    with pytest.raises(errors.TooMany):
        start(tenant)
    start(other_tenant)
    bulk_runner.run(lambda: True)
    start(tenant)


def test_what_could_not_be_done_is_noted_up_to_a_bound(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_runner, "PIECE", 10)
    monkeypatch.setattr(bulk_runner, "NOTED", 20)
    ids = dead(tenant, 45)
    job = start(tenant)
    services.replay(tenant, ids).run_sync()
    finished(job)
    assert counts(job) == (0, 45, 0)
    assert BulkItem.objects.filter(job=job).count() == 20
    assert queries.page([tenant.tid], Filter()).letters == []


def test_the_schedule_runs_jobs_every_second() -> None:
    app.loader.import_default_modules()
    assert "queues.bulk" in app.tasks


@pytest.mark.spec("ADM-2", "A replay is taken back: what nobody has claimed yet is a dead letter again")
@pytest.mark.parametrize("by_ids", [False, True], ids=["filter", "ids"])
def test_a_replay_is_taken_back(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch, by_ids: bool) -> None:
    monkeypatch.setattr(bulk_runner, "PIECE", 10)
    ids = dead(tenant, 25)
    other = dead(tenant, 1, command="mail")
    replayed = finished(start(tenant, ids if by_ids else RENDER))
    periodic_tasks.run_drain(lambda: True)
    claimed = services.claim(tenant, ["render"], "w", count=3).run_sync().tasks
    done = NewResult(task_id=claimed[0].id, status=Status.COMPLETED, result=b"{}")
    services.submit(tenant, "w", [done]).run_sync()
    services.nack(tenant, claimed[1].id, "w", reason="again").run_sync()  # dead once more, by itself
    queries.replay(tenant, [ids[10]])  # is no dead letter, and stays what it is
    periodic_tasks.run_drain(lambda: True)

    job = finished(bulk_jobs.recall([tenant.tid], str(replayed.pk), actor="root", reason="too early"))
    assert (job.state, job.done, job.failed) == ("done", 22, 0)
    assert stats(tenant) == (0, 23)
    periodic_tasks.run_drain(lambda: True)
    listed = [letter.id for letter in queries.page([tenant.tid], RENDER).letters]
    assert sorted(listed) == sorted([*ids[3:], ids[1]])
    assert len(queries.page([tenant.tid], Filter()).letters) == 23 + len(other)
    # And back again, each once.
    again = finished(start(tenant))
    assert (again.done, again.skipped) == (23, 0)
    assert stats(tenant) == (23, 0)
    taken = [task.id for task in services.claim(tenant, ["render"], "w", count=50).run_sync().tasks]
    assert sorted(taken) == sorted(listed)
    assert services.claim(tenant, ["render"], "w", count=50).run_sync().tasks == []
    assert stats(tenant) == (0, 0)


def test_what_was_taken_back_and_replayed_is_not_claimed_before_its_time(tenant: TenantSnapshot) -> None:
    """Its old place in line must not be a second way to it."""
    [task_id] = dead(tenant, 1)
    client().hset(keys.task(keys.of_partition(engine().partition_of(tenant.tid)).root, task_id), "max", 3)
    replayed = finished(start(tenant))
    finished(bulk_jobs.recall([tenant.tid], str(replayed.pk), actor="root"))
    assert stats(tenant) == (0, 1)
    services.replay(tenant, [task_id]).run_sync()
    assert stats(tenant) == (1, 0)
    [task] = services.claim(tenant, ["render"], "w").run_sync().tasks
    services.nack(tenant, task.id, "w", delay_seconds=500).run_sync()
    assert services.claim(tenant, ["render"], "w", count=10).run_sync().tasks == []
    assert selectors.queue_stats(tenant, "render").run_sync().delayed == 1


def test_a_taken_back_replay_that_dies_goes_on_where_it_was(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead(tenant, 5)
    replayed = finished(start(tenant))
    periodic_tasks.run_drain(lambda: True)
    job = bulk_jobs.recall([tenant.tid], str(replayed.pk), actor="root")
    assert bulk_jobs.recall([tenant.tid], str(replayed.pk), actor="root") == job
    bulk_runner.step(job.pk)
    fail_at(monkeypatch, "_send", after=True)
    with pytest.raises(RuntimeError):
        bulk_runner.step(job.pk)
    finished(job)
    assert (counts(job), stats(tenant)) == ((5, 0, 0), (0, 5))
    # A second time there is nothing left to take back.
    assert finished(bulk_jobs.recall([tenant.tid], str(replayed.pk), actor="root")).state == "done"
    assert stats(tenant) == (0, 5)


def test_only_an_ended_replay_of_ones_own_is_taken_back(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    dead(tenant, 2)
    running = start(tenant)
    with pytest.raises(errors.Conflict):
        bulk_jobs.recall([tenant.tid], str(running.pk), actor="root")
    finished(running)
    BulkJob.objects.filter(pk=running.pk).update(ended_at=running.ended_at - bulk_jobs.UNDO)
    with pytest.raises(errors.Conflict, match="longer than 24 hours"):
        bulk_jobs.recall([tenant.tid], str(running.pk), actor="root")
    with pytest.raises(errors.NotFound):
        bulk_jobs.recall([other_tenant.tid], str(running.pk), actor="root")
    deleted = finished(start(tenant, kind="delete"))
    with pytest.raises(errors.Conflict):
        bulk_jobs.recall([tenant.tid], str(deleted.pk), actor="root")
    assert stats(tenant) == (2, 0)


def test_a_job_that_cannot_go_on_says_so_and_holds_up_nobody(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead(tenant, 3)
    dead(other_tenant, 3)
    endless = start(tenant, Filter(json_path="$.n"))
    fine = start(other_tenant)
    real = pagination.ascending

    def slow(which: pagination.RowFilter, *args: Any) -> pagination.PageKeys:
        if which.where:
            with pagination.at_most_for(20), connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(5)")
        return real(which, *args)

    def told(which: pagination.RowFilter, *args: Any) -> pagination.PageKeys:
        try:
            return slow(which, *args)
        except pagination.TooLongError:
            raise errors.InvalidRequest(pagination.TOO_LONG) from None

    monkeypatch.setattr(pagination, "ascending", told)
    assert bulk_runner.run(lambda: True) == 3
    assert (finished(fine).state, finished(endless).state, endless.error) == ("done", "failed", pagination.TOO_LONG)
    assert (stats(tenant), stats(other_tenant)) == ((0, 3), (3, 0))
