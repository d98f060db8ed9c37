"""Bulk jobs: dry run, rate, canaries, cancel and undo.

Each task is processed once and counted once, even if a process is killed at any point.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
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
from queues.domain import NewResult, NewTask, TaskStatus
from queues.engine import keys
from queues.models import AuditedResult, BulkItem, BulkJob
from queues.search import pagination
from tenants.domain import TenantSnapshot
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("stop_tenant_cache")]
RENDER = Filter(command="render")


def create_dead_letters(
    tenant: TenantSnapshot, count: int, *, command: str = "render", reason: str = "boom"
) -> list[str]:
    """Create dead letters, and store them in the audit."""
    ids: list[str] = []
    while len(ids) < count:
        new = [
            NewTask(command=command, payload=f'{{"n":{n}}}', max_attempts=1) for n in range(min(500, count - len(ids)))
        ]
        services.enqueue(tenant, new).run_sync()
        ids += exhaust_tasks(tenant, command=command, reason=reason)
    periodic_tasks.run_drain(lambda: True)
    return ids


def exhaust_tasks(tenant: TenantSnapshot, *, command: str = "render", reason: str = "boom") -> list[str]:
    """Claim all ready tasks, and nack them so that they become dead letters."""
    ids = []
    while tasks := services.claim(tenant, [command], "w", count=1000).run_sync().tasks:
        ids += [task.id for task in tasks]
        for task in tasks:
            services.nack(tenant, task.id, "w", reason=reason, delay_seconds=0).run_sync()
    return ids


def start_job(tenant: TenantSnapshot, selection: Any = RENDER, kind: str = "replay", **options: Any) -> BulkJob:
    return bulk_jobs.start(tenant, kind, selection, actor="root", **options)


def run_to_end(job: BulkJob) -> BulkJob:
    """Run the job until it ends or watches its canaries."""
    for _ in range(10_000):
        job.refresh_from_db()
        if job.state not in ("running", "cancelling"):
            return job
        bulk_runner.step(job.pk)
    raise AssertionError("the job does not end")


def count_ready_and_dead(tenant: TenantSnapshot, command: str = "render") -> tuple[int, int]:
    stats = selectors.queue_stats(tenant, command).run_sync()
    return stats.ready, stats.dlq


def outcome_counts(job: BulkJob) -> tuple[int, int, int]:
    return job.done, job.skipped, job.failed


@pytest.mark.spec("ADM-2", "All dead letters that match are replayed as a job with progress, the oldest first")
def test_all_matching_dead_letters_are_replayed_in_their_order(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_runner, "BATCH_SIZE", 100)
    ids = create_dead_letters(tenant, 450)
    others = create_dead_letters(tenant, 3, command="mail")
    job = start_job(tenant, reason="the gateway is back")
    progress = []
    while not job.is_over:
        bulk_runner.step(job.pk)
        job.refresh_from_db()
        progress.append(job.done)
    assert (job.state, job.total, outcome_counts(job)) == ("done", 450, (450, 0, 0))
    assert progress == sorted(progress)
    assert len(set(progress)) >= 3
    assert (job.actor, job.reason) == ("root", "the gateway is back")
    assert (count_ready_and_dead(tenant), count_ready_and_dead(tenant, "mail")) == ((450, 0), (0, 3))
    taken = [task.id for task in services.claim(tenant, ["render"], "w", count=450).run_sync().tasks]
    assert taken == ids
    periodic_tasks.run_drain(lambda: True)
    assert [letter.id for letter in queries.page([tenant.tid], Filter()).letters] == others[::-1]


def test_periodic_task_runs_all_jobs_until_they_end(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    create_dead_letters(tenant, 30)
    create_dead_letters(other_tenant, 20)
    jobs = [start_job(tenant), start_job(other_tenant)]
    assert periodic_tasks.run_bulk_jobs() == "50 handled"
    assert [run_to_end(job).state for job in jobs] == ["done", "done"]
    assert (count_ready_and_dead(tenant), count_ready_and_dead(other_tenant)) == ((30, 0), (20, 0))
    assert periodic_tasks.run_bulk_jobs() == "0 handled"


@pytest.mark.spec("ADM-2", "Selected dead letters are replayed; live tasks are skipped, and missing tasks are reported")
def test_selected_tasks_are_replayed_and_the_errors_of_the_others_recorded(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot
) -> None:
    replayed_before, gone, *rest = create_dead_letters(tenant, 6)
    [foreign] = create_dead_letters(other_tenant, 1)
    queries.replay(tenant, [replayed_before])
    queries.delete(tenant, [gone])
    job = run_to_end(start_job(tenant, [replayed_before, gone, foreign, *rest[:3], rest[0]]))
    assert (job.state, job.total, outcome_counts(job)) == ("done", 6, (3, 1, 2))
    wrong = {str(item.task_id): (item.outcome, item.error) for item in bulk_jobs.list_items(job) if item.error}
    assert wrong == {
        replayed_before: ("skipped", "not_dead"),
        gone: ("failed", "task_not_found"),
        foreign: ("failed", "task_not_found"),
    }
    assert bulk_jobs.list_items(job, outcome="done").count() == 3
    assert (count_ready_and_dead(tenant), count_ready_and_dead(other_tenant)) == ((4, 1), (0, 1))


@pytest.mark.spec("ADM-2", "All dead letters that match are deleted as a job; tasks replayed in the meantime are not")
def test_all_matching_dead_letters_are_deleted(tenant: TenantSnapshot) -> None:
    first, second, *rest = create_dead_letters(tenant, 5)
    job = start_job(tenant, kind="delete")
    bulk_runner.step(job.pk)  # the batch is chosen, and not sent yet
    services.replay(tenant, [first]).run_sync()
    services.purge(tenant, [second]).run_sync()
    run_to_end(job)
    assert (job.state, outcome_counts(job)) == ("done", (4, 1, 0))
    assert count_ready_and_dead(tenant) == (1, 0)
    periodic_tasks.run_drain(lambda: True)
    assert queries.page([tenant.tid], Filter()).letters == []
    assert AuditedResult.objects.filter(pk__in=rest).count() == 3


def test_dry_run_returns_count_and_sample_and_changes_nothing(tenant: TenantSnapshot) -> None:
    ids = create_dead_letters(tenant, 25)
    create_dead_letters(tenant, 2, reason="other")
    trial = bulk_jobs.dry_run(tenant, Filter(error="boom"))
    assert (trial.count, len(trial.sample)) == (25, bulk_jobs.SAMPLE_SIZE)
    assert {letter.id for letter in trial.sample} <= set(ids)
    assert count_ready_and_dead(tenant) == (0, 27)
    assert not BulkJob.objects.exists()


@pytest.mark.spec("ADM-2", "A job excludes tasks that die after its start: no job replays its own failures")
def test_task_that_dies_again_is_replayed_once_by_a_job(tenant: TenantSnapshot) -> None:
    ids = create_dead_letters(tenant, 300)
    job = start_job(tenant)
    for _ in range(2):
        bulk_runner.step(job.pk)
    assert len(exhaust_tasks(tenant)) == 250
    periodic_tasks.run_drain(lambda: True)
    run_to_end(job)
    assert outcome_counts(job) == (300, 0, 0)
    assert count_ready_and_dead(tenant) == (50, 250)
    assert run_to_end(start_job(tenant)).done == 250
    assert sorted(exhaust_tasks(tenant)) == sorted(ids)


def crash_at(monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool) -> None:
    """Let the next call of this function crash, before or after its work. Later calls work."""
    real, crashes = getattr(bulk_runner, name), []

    def crash_once(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs) if after or crashes else None
        if not crashes:
            crashes.append(1)
            raise RuntimeError("killed")
        return result

    monkeypatch.setattr(bulk_runner, name, crash_once)


@pytest.mark.spec("ADM-2", "A job continues after a crash at any point: each item is processed and counted once")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("function", ["_send", "_record", "_choose_next", "_clear_dead_flags"])
@pytest.mark.parametrize("drained", [False, True], ids=["audit not drained", "audit drained"])
@pytest.mark.parametrize("kind", ["replay", "delete"])
def test_crashed_job_continues_at_its_position(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch, function: str, after: bool, drained: bool, kind: str
) -> None:
    monkeypatch.setattr(bulk_runner, "BATCH_SIZE", 10)
    create_dead_letters(tenant, 35)
    job = start_job(tenant, kind=kind)
    bulk_runner.step(job.pk)
    crash_at(monkeypatch, function, after=after)
    with pytest.raises(RuntimeError):
        bulk_runner.step(job.pk)
    if drained:
        periodic_tasks.run_drain(lambda: True)
    run_to_end(job)
    assert (job.state, outcome_counts(job)) == ("done", (35, 0, 0))
    assert count_ready_and_dead(tenant) == ((35, 0) if kind == "replay" else (0, 0))
    # The stream has one entry for each task.
    entries = client().xrange(keys.of_partition(engine().partition_of(tenant.tid)).events)
    dead_before = AuditedResult.objects.filter(is_dead=True).count()
    periodic_tasks.run_drain(lambda: True)
    assert AuditedResult.objects.filter(is_dead=True).count() <= dead_before
    changed_ids = [fields[b"id"] for _, fields in entries if fields[b"outcome"] in (b"REPLAYED", b"PURGED")]
    assert len(changed_ids) == len(set(changed_ids))


def test_task_that_died_again_before_its_batch_was_sent_again_is_not_replayed_twice(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script needs the job's id, because the task looks like one that was never replayed."""
    create_dead_letters(tenant, 5)
    job = start_job(tenant)
    bulk_runner.step(job.pk)
    crash_at(monkeypatch, "_send", after=True)
    with pytest.raises(RuntimeError):
        bulk_runner.step(job.pk)
    assert len(exhaust_tasks(tenant)) == 5
    run_to_end(job)
    assert outcome_counts(job) == (5, 0, 0)
    assert count_ready_and_dead(tenant) == (0, 5)


def test_two_processes_at_one_job_count_each_task_once(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process resumes, and sends a batch that another one has sent in the meantime."""
    create_dead_letters(tenant, 30)
    monkeypatch.setattr(bulk_runner, "BATCH_SIZE", 10)
    job = start_job(tenant)
    bulk_runner.step(job.pk)
    real = bulk_runner._send

    def send_late(stale_job: BulkJob) -> bulk_runner.Results:
        monkeypatch.setattr(bulk_runner, "_send", real)
        bulk_runner.step(job.pk)
        return real(stale_job)

    monkeypatch.setattr(bulk_runner, "_send", send_late)
    assert bulk_runner.step(job.pk) == 0
    job.refresh_from_db()
    assert job.done == 10
    run_to_end(job)
    assert (outcome_counts(job), count_ready_and_dead(tenant)) == ((30, 0, 0), (30, 0))


@pytest.mark.real_time
@pytest.mark.spec("ADM-2", "A bulk replay killed by SIGKILL continues, and each item is processed exactly once")
def test_job_of_a_killed_worker_replays_every_task_once(tenant: TenantSnapshot) -> None:
    count = 3_000
    create_dead_letters(tenant, count)
    job = start_job(tenant, rate_per_second=1_500)
    database = connection.settings_dict
    url = f"postgresql://postgres@/{database['NAME']}?host={database['OPTIONS'].get('host') or database['HOST']}"
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "codeq_site.settings"}
    code = (
        "import django; django.setup(); from queues.deadletters import bulk_runner; "
        "bulk_runner.run(lambda: True, seconds=60)"
    )
    kills = 0
    try:
        while job.state == "running":
            worker = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=settings.BASE_DIR)
            before = job.handled

            def has_progressed(before: int = before) -> bool:
                job.refresh_from_db()
                return job.is_over or job.handled >= before + 500

            until(has_progressed, 60, every=0.001)
            worker.send_signal(signal.SIGKILL)
            worker.wait(10)
            kills += 1
            job.refresh_from_db()
    finally:
        worker.kill()
        worker.wait(10)
    assert kills >= 3
    assert (job.state, outcome_counts(job)) == ("done", (count, 0, 0))
    assert count_ready_and_dead(tenant) == (count, 0)
    taken = [task.id for _ in range(3) for task in services.claim(tenant, ["render"], "w", count=1000).run_sync().tasks]
    assert len(set(taken)) == len(taken) == count


@pytest.mark.spec("ADM-2", "A job does not exceed its rate")
def test_job_does_not_exceed_its_rate(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    create_dead_letters(tenant, 120)
    now = datetime.now(UTC)
    monkeypatch.setattr(bulk_runner, "_now", lambda: now)
    job = start_job(tenant, rate_per_second=50)
    sent = []
    for _ in range(40):
        bulk_runner.step(job.pk)
        bulk_runner.step(job.pk)
        job.refresh_from_db()
        sent.append(job.handled + len(job.sending))
        now += timedelta(seconds=0.1)
    assert sent[-1] == 120
    for tenth, number in enumerate(sent):
        # The tasks of one second may be sent at once. Very small batches are not sent.
        assert min(120, 5 * tenth - 2) <= number <= 50 + 5 * tenth


def test_pause_does_not_increase_the_rate(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    create_dead_letters(tenant, 100)
    now = datetime.now(UTC)
    monkeypatch.setattr(bulk_runner, "_now", lambda: now)
    job = start_job(tenant, rate_per_second=10)
    bulk_runner.step(job.pk)
    now += timedelta(hours=1)
    for _ in range(5):
        bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.handled + len(job.sending) == 20


@pytest.fixture
def watch_job(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BulkJob]:
    """Start a job and run it until it watches its canaries."""

    def run_until_watching(**canary: Any) -> BulkJob:
        create_dead_letters(tenant, 50)
        job = start_job(tenant, canary=Canary(**({"count": 10, "percent": 20, "seconds": 30} | canary)))
        for _ in range(3):
            bulk_runner.step(job.pk)
        job.refresh_from_db()
        assert (job.state, job.done) == ("watching", 10)
        return job

    return run_until_watching


def end_canaries(tenant: TenantSnapshot, count: int) -> None:
    """End the ten canaries: this many become dead letters, the others complete."""
    tasks = services.claim(tenant, ["render"], "w", count=10).run_sync().tasks
    assert len(tasks) == 10
    for task in tasks[:count]:
        services.nack(tenant, task.id, "w").run_sync()
    results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"{}") for task in tasks[count:]]
    if results:
        services.submit(tenant, "w", results).run_sync()
    periodic_tasks.run_drain(lambda: True)


@pytest.mark.spec("ADM-2", "Canaries are replayed first; if too many of them die again, the others are not replayed")
def test_job_stops_when_too_many_canaries_die(tenant: TenantSnapshot, watch_job: Callable[..., BulkJob]) -> None:
    job = watch_job()
    end_canaries(tenant, 3)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert (job.state, job.canaries_died, outcome_counts(job)) == ("stopped", 3, (10, 0, 0))
    assert job.is_over
    assert bulk_jobs.list_items(job).filter(is_canary=True).count() == 10
    assert count_ready_and_dead(tenant) == (0, 43)
    assert bulk_runner.run(lambda: True) == 0


def test_job_continues_when_few_canaries_die(
    tenant: TenantSnapshot, watch_job: Callable[..., BulkJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = watch_job()
    end_canaries(tenant, 2)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "watching"  # few have died, and the time to watch has not passed
    later = datetime.now(UTC) + timedelta(seconds=31)
    monkeypatch.setattr(bulk_runner, "_now", lambda: later)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "watching"  # the audit does not have the events up to that time yet
    BulkJob.objects.update(watched_until=datetime.now(UTC) - timedelta(seconds=1))
    bulk_runner.step(job.pk)
    run_to_end(job)
    assert (job.state, job.canaries_died, outcome_counts(job)) == ("done", 2, (50, 0, 0))


def test_job_waits_until_the_audit_has_the_canaries_ends(
    tenant: TenantSnapshot, watch_job: Callable[..., BulkJob]
) -> None:
    job = watch_job(seconds=0)
    end_canaries(tenant, 0)
    # A task ends, and the drain does not run.
    [waiting] = [services.enqueue(tenant, [NewTask(command="mail", payload="1", max_attempts=1)]).run_sync()[0]]
    services.claim(tenant, ["mail"], "w").run_sync()
    services.nack(tenant, waiting.task.id, "w").run_sync()
    BulkJob.objects.update(watched_until=datetime.now(UTC))
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "watching"
    periodic_tasks.run_drain(lambda: True)
    bulk_runner.step(job.pk)
    job.refresh_from_db()
    assert job.state == "running"


@pytest.mark.spec("ADM-2", "A job is cancelled: no further batch is chosen, and the batch being sent is counted")
def test_cancelled_job_sends_only_its_current_batch(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_runner, "BATCH_SIZE", 10)
    create_dead_letters(tenant, 50)
    job = start_job(tenant)
    bulk_runner.step(job.pk)
    bulk_runner.step(job.pk)
    assert bulk_jobs.cancel([tenant.tid], str(job.pk)).state == "cancelling"
    run_to_end(job)
    assert (job.state, job.is_over, outcome_counts(job)) == ("cancelled", True, (20, 0, 0))
    assert count_ready_and_dead(tenant) == (20, 30)
    assert bulk_jobs.cancel([tenant.tid], str(job.pk)).state == "cancelled"
    done = run_to_end(start_job(tenant))
    assert bulk_jobs.cancel([tenant.tid], str(done.pk)).state == "done"


def test_job_that_has_not_started_is_cancelled_at_once(tenant: TenantSnapshot) -> None:
    create_dead_letters(tenant, 5)
    job = start_job(tenant)
    assert bulk_jobs.cancel([tenant.tid], str(job.pk)).state == "cancelled"
    assert bulk_runner.run(lambda: True) == 0
    assert count_ready_and_dead(tenant) == (0, 5)


@pytest.mark.spec(
    "TEN-3", "A tenant's jobs process its own dead letters only, and only the tenant sees and cancels them"
)
def test_tenant_cannot_reach_another_tenants_jobs_or_dead_letters(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot
) -> None:
    create_dead_letters(tenant, 5)
    other_ids = create_dead_letters(other_tenant, 5)
    job = start_job(tenant, Filter())
    for access in (bulk_jobs.find, bulk_jobs.cancel):
        with pytest.raises(errors.NotFound):
            access([other_tenant.tid], str(job.pk))
        with pytest.raises(errors.NotFound):
            access([tenant.tid], str(uuid.uuid4()))
        with pytest.raises(errors.NotFound):
            access([tenant.tid], "nonsense")
    assert list(bulk_jobs.list_jobs([other_tenant.tid])) == []
    assert list(bulk_jobs.list_jobs(None)) == [job]
    run_to_end(job)
    assert outcome_counts(run_to_end(start_job(tenant, other_ids, kind="delete"))) == (
        5,
        0,
        0,
    )  # reported like missing tasks
    assert (count_ready_and_dead(tenant), count_ready_and_dead(other_tenant)) == ((5, 0), (0, 5))
    assert len(queries.page([other_tenant.tid], Filter()).letters) == 5


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        ([], {}),
        (["x"], {}),
        ([str(uuid.UUID(int=7))] * (bulk_jobs.MAX_IDS + 1), {}),
        (Filter(text="-"), {}),
        (Filter(json_path="$["), {}),
        (RENDER, {"rate_per_second": 0}),
        (RENDER, {"canary": Canary(count=-1)}),
        (RENDER, {"canary": Canary(count=bulk_jobs.MAX_CANARIES + 1)}),
        (RENDER, {"canary": Canary(count=1, percent=101)}),
        (RENDER, {"canary": Canary(count=1), "kind": "delete"}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_invalid_job_is_refused(tenant: TenantSnapshot, selection: Any, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        start_job(tenant, selection, **options)
    assert not BulkJob.objects.exists()


def test_number_of_unfinished_jobs_of_a_tenant_is_limited(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    for _ in range(bulk_jobs.MAX_JOBS):
        start_job(tenant)
    with pytest.raises(errors.TooMany):
        start_job(tenant)
    start_job(other_tenant)
    bulk_runner.run(lambda: True)
    start_job(tenant)


def test_number_of_recorded_failures_is_limited(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_runner, "BATCH_SIZE", 10)
    monkeypatch.setattr(bulk_runner, "MAX_RECORDED_FAILURES", 20)
    ids = create_dead_letters(tenant, 45)
    job = start_job(tenant)
    services.replay(tenant, ids).run_sync()
    run_to_end(job)
    assert outcome_counts(job) == (0, 45, 0)
    assert BulkItem.objects.filter(job=job).count() == 20
    assert queries.page([tenant.tid], Filter()).letters == []


def test_bulk_jobs_have_a_periodic_task() -> None:
    app.loader.import_default_modules()
    assert "queues.bulk" in app.tasks


@pytest.mark.spec("ADM-2", "A replay is undone: tasks that no worker has claimed become dead letters again")
@pytest.mark.parametrize("by_ids", [False, True], ids=["filter", "ids"])
def test_replay_is_undone(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch, by_ids: bool) -> None:
    monkeypatch.setattr(bulk_runner, "BATCH_SIZE", 10)
    ids = create_dead_letters(tenant, 25)
    other = create_dead_letters(tenant, 1, command="mail")
    replayed = run_to_end(start_job(tenant, ids if by_ids else RENDER))
    periodic_tasks.run_drain(lambda: True)
    claimed = services.claim(tenant, ["render"], "w", count=3).run_sync().tasks
    done = NewResult(task_id=claimed[0].id, status=TaskStatus.COMPLETED, result=b"{}")
    services.submit(tenant, "w", [done]).run_sync()
    services.nack(tenant, claimed[1].id, "w", reason="again").run_sync()  # a dead letter again
    queries.replay(tenant, [ids[10]])  # fails: the task is not a dead letter
    periodic_tasks.run_drain(lambda: True)

    job = run_to_end(bulk_jobs.undo_replay([tenant.tid], str(replayed.pk), actor="root", reason="too early"))
    assert (job.state, job.done, job.failed) == ("done", 22, 0)
    assert count_ready_and_dead(tenant) == (0, 23)
    periodic_tasks.run_drain(lambda: True)
    listed = [letter.id for letter in queries.page([tenant.tid], RENDER).letters]
    assert sorted(listed) == sorted([*ids[3:], ids[1]])
    assert len(queries.page([tenant.tid], Filter()).letters) == 23 + len(other)
    # A second replay returns each task once.
    again = run_to_end(start_job(tenant))
    assert (again.done, again.skipped) == (23, 0)
    assert count_ready_and_dead(tenant) == (23, 0)
    taken = [task.id for task in services.claim(tenant, ["render"], "w", count=50).run_sync().tasks]
    assert sorted(taken) == sorted(listed)
    assert services.claim(tenant, ["render"], "w", count=50).run_sync().tasks == []
    assert count_ready_and_dead(tenant) == (0, 0)


def test_task_replayed_after_an_undo_is_not_claimed_too_early(tenant: TenantSnapshot) -> None:
    """The id that the undo left in the ready list does not make the delayed task claimable."""
    [task_id] = create_dead_letters(tenant, 1)
    client().hset(keys.task(keys.of_partition(engine().partition_of(tenant.tid)).root, task_id), "max", 3)
    replayed = run_to_end(start_job(tenant))
    run_to_end(bulk_jobs.undo_replay([tenant.tid], str(replayed.pk), actor="root"))
    assert count_ready_and_dead(tenant) == (0, 1)
    services.replay(tenant, [task_id]).run_sync()
    assert count_ready_and_dead(tenant) == (1, 0)
    [task] = services.claim(tenant, ["render"], "w").run_sync().tasks
    services.nack(tenant, task.id, "w", delay_seconds=500).run_sync()
    assert services.claim(tenant, ["render"], "w", count=10).run_sync().tasks == []
    assert selectors.queue_stats(tenant, "render").run_sync().delayed == 1


def test_crashed_undo_continues_at_its_position(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    create_dead_letters(tenant, 5)
    replayed = run_to_end(start_job(tenant))
    periodic_tasks.run_drain(lambda: True)
    job = bulk_jobs.undo_replay([tenant.tid], str(replayed.pk), actor="root")
    assert bulk_jobs.undo_replay([tenant.tid], str(replayed.pk), actor="root") == job
    bulk_runner.step(job.pk)
    crash_at(monkeypatch, "_send", after=True)
    with pytest.raises(RuntimeError):
        bulk_runner.step(job.pk)
    run_to_end(job)
    assert (outcome_counts(job), count_ready_and_dead(tenant)) == ((5, 0, 0), (0, 5))
    # A second undo finds no replayed task.
    assert run_to_end(bulk_jobs.undo_replay([tenant.tid], str(replayed.pk), actor="root")).state == "done"
    assert count_ready_and_dead(tenant) == (0, 5)


def test_only_a_tenants_own_ended_replay_is_undone(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    create_dead_letters(tenant, 2)
    running = start_job(tenant)
    with pytest.raises(errors.Conflict):
        bulk_jobs.undo_replay([tenant.tid], str(running.pk), actor="root")
    run_to_end(running)
    BulkJob.objects.filter(pk=running.pk).update(ended_at=running.ended_at - bulk_jobs.UNDO_PERIOD)
    with pytest.raises(errors.Conflict, match="more than 24 hours"):
        bulk_jobs.undo_replay([tenant.tid], str(running.pk), actor="root")
    with pytest.raises(errors.NotFound):
        bulk_jobs.undo_replay([other_tenant.tid], str(running.pk), actor="root")
    deleted = run_to_end(start_job(tenant, kind="delete"))
    with pytest.raises(errors.Conflict):
        bulk_jobs.undo_replay([tenant.tid], str(deleted.pk), actor="root")
    assert count_ready_and_dead(tenant) == (2, 0)


def test_failed_job_records_its_error_and_does_not_stop_the_others(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_dead_letters(tenant, 3)
    create_dead_letters(other_tenant, 3)
    slow_job = start_job(tenant, Filter(json_path="$.n"))
    other_job = start_job(other_tenant)
    real = pagination._read_window

    def read_slowly(row_filter: pagination.RowFilter, *args: Any) -> list[Any]:
        if row_filter.scanned:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(5)")
        return real(row_filter, *args)

    monkeypatch.setattr(pagination, "WINDOW_MS", 500)
    monkeypatch.setattr(pagination, "_read_window", read_slowly)
    assert bulk_runner.run(lambda: True) == 3
    assert run_to_end(other_job).state == "done"
    assert (run_to_end(slow_job).state, slow_job.error) == ("failed", pagination.TOO_LONG)
    assert (count_ready_and_dead(tenant), count_ready_and_dead(other_tenant)) == ((0, 3), (3, 0))
