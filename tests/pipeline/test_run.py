"""The command, the hourly run, the run log, and the marts in the admin."""

from __future__ import annotations

import io
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from core import conf as settings
from pipeline import periodic_tasks, services
from pipeline.models import MARTS, Failure, RunLog, Throughput, WebhookHealth
from pipeline.spark import jobs
from pipeline.spark.lake import Lake, files
from tenants.models import Tenant
from tests.factories import DeliveryAttemptFactory, DeliveryFactory, TenantFactory, TenantMembershipFactory, UserFactory
from tests.pipeline.history import Audit, at, build_attempt, build_dead_attempt, count_rows
from tests.waiting import until


@pytest.fixture
def call_pipeline(spark: Any, lake: Lake, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call `manage.py pipeline …` with the tests' session and lake, and return its output."""
    monkeypatch.setattr(services, "start_spark", lambda settings: spark)

    def call(*arguments: str) -> str:
        output = io.StringIO()
        call_command("pipeline", "--lake", lake.url, *arguments, stdout=output, stderr=output)
        return output.getvalue()

    return call


@pytest.fixture
def two_tenants(transactional_db: None) -> None:
    for slug in ("acme", "beta"):
        TenantFactory(tid=f"{slug}0001", slug=slug)


@pytest.mark.spec("PIP-1", "One command computes the marts from history, and logs every job")
def test_run_fills_the_marts_and_the_run_log(call_pipeline: Any, lake: Lake, audit: Audit, two_tenants: None) -> None:
    audit.add(
        [
            build_attempt(),
            build_dead_attempt(error="boom 7"),
            build_attempt(outcome="?"),
            build_attempt(tenant_id="beta0001"),
        ]
    )
    output = call_pipeline("run")
    row_count = sum(log.rows_out for log in RunLog.objects.all())
    assert output.strip().splitlines()[-1] == f"{len(jobs.JOBS)} jobs, {row_count} rows written"
    assert [log.job for log in RunLog.objects.order_by("started_at")] == list(jobs.JOBS)
    assert {log.state for log in RunLog.objects.all()} == {"succeeded"}
    assert len({log.run for log in RunLog.objects.all()}) == 1
    ingest = RunLog.objects.get(job="ingest")
    assert (ingest.rows_in, ingest.rows_out, ingest.quarantined, ingest.late_dropped) == (4, 3, 1, 0)
    assert ingest.notes.splitlines()[0] == "1 x unknown outcome"
    assert ingest.ended_at
    assert ingest.stage.startswith("ended")
    assert Failure.objects.get().fingerprint == "render: boom <n>"
    row = Throughput.objects.select_related("tenant").get(tenant_id="beta0001")
    assert (row.tenant.slug, row.attempts, row.hour.isoformat()) == ("beta", 1, "2026-03-10T12:00:00+00:00")
    assert {name for name, mart in MARTS.items() if mart.objects.exists()} == set(MARTS) - {"webhooks"}
    assert RunLog.objects.get(job="publish").rows_out == sum(mart.objects.count() for mart in MARTS.values())


def test_single_job_and_selected_days_can_be_run(call_pipeline: Any, lake: Lake, audit: Audit) -> None:
    audit.add([build_attempt()])
    assert "1 jobs, 1 rows written" in call_pipeline("run", "ingest")
    assert count_rows(lake, "raw") == {"2026-03-10/acme0001": 1}
    assert "1 jobs, 1 rows written" in call_pipeline("run", "ingest", "--since", "2026-03-10", "--until", "2026-03-11")
    assert "1 jobs, 0 rows written" in call_pipeline("run", "ingest")
    with pytest.raises(CommandError, match="no such job: nonsense"):
        call_pipeline("run", "nonsense")


def test_failed_job_is_logged_with_its_error(call_pipeline: Any, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(context: Any) -> Any:
        raise RuntimeError("the disk is full\n\nJVM stacktrace:\nat java.lang.Thread")

    monkeypatch.setitem(jobs.JOBS, "attempts", explode)
    with pytest.raises(RuntimeError, match="the disk is full"):
        call_pipeline("run")
    assert {log.job: log.state for log in RunLog.objects.all()} == {"ingest": "succeeded", "attempts": "failed"}
    assert RunLog.objects.get(job="attempts").error == "the disk is full"
    # The next run closes the entry of a killed process.
    RunLog.objects.filter(job="ingest").update(state="running", ended_at=None)
    monkeypatch.undo()

    def fail_to_start(settings: Any) -> Any:
        raise RuntimeError("Spark does not start")

    monkeypatch.setattr(services, "start_spark", fail_to_start)
    with pytest.raises(RuntimeError, match="does not start"):
        call_pipeline("run", "ingest")
    assert not RunLog.objects.filter(state="running").exists()


def test_unreachable_lake_is_logged_without_the_java_stack_trace(call_pipeline: Any, audit: Audit) -> None:
    with pytest.raises(Exception, match="s3a"):
        call_pipeline("--lake", "s3a://bucket/lake", "run")
    log = RunLog.objects.get()
    assert (log.job, log.state) == ("ingest", "failed")
    assert "S3AFileSystem not found" in log.error
    assert "\tat " not in log.error


@pytest.mark.spec("BEA-1", "Only one pipeline run is active at a time")
def test_second_concurrent_run_reports_it_and_does_nothing(call_pipeline: Any, audit: Audit) -> None:
    with services.acquire_run_lock():
        assert call_pipeline("run").strip() == "Another run of the pipeline is in progress."
    assert not RunLog.objects.exists()
    assert "jobs" in call_pipeline("run", "ingest")


def test_run_lock_is_released_when_its_process_ends(audit: Audit) -> None:
    script = (
        "import sys, psycopg; c = psycopg.connect(sys.stdin.readline().strip(), autocommit=True)\n"
        "c.execute(\"SELECT pg_advisory_lock(hashtextextended('codeq:pipeline', 0))\")\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout
    process.stdin.write(audit.dsn + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    with pytest.raises(services.AlreadyRunning), services.acquire_run_lock():
        pass
    process.kill()
    process.communicate()

    def is_released() -> bool:
        try:
            with services.acquire_run_lock():
                return True
        except services.AlreadyRunning:
            return False

    until(is_released, every=0.1)


class FakeLock:
    def __init__(self) -> None:
        self.renewals = 0

    def renew(self) -> bool:
        self.renewals += 1
        return True


def run_periodic_task(monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[str, int]:
    """Run the periodic task with this script in place of `manage.py pipeline run`.

    Return the task's result and the number of lock renewals.
    """
    popen, lock = subprocess.Popen, FakeLock()
    monkeypatch.setattr(periodic_tasks, "LOCK_SECONDS", 0.4)
    monkeypatch.setattr(
        periodic_tasks.subprocess, "Popen", lambda _, **more: popen([sys.executable, "-c", script], **more)
    )
    return periodic_tasks.run_in_process(lock), lock.renewals


def test_periodic_task_renews_its_lock_and_returns_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time; time.sleep(0.5); print('ingest: …'); print('9 jobs, 4 rows written')"
    last_line, renewals = run_periodic_task(monkeypatch, script)
    assert last_line == "9 jobs, 4 rows written"
    assert renewals >= 2


def test_periodic_task_fails_if_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="ended with exit status 3: no space left"):
        run_periodic_task(monkeypatch, "import sys; print('no space left'); sys.exit(3)")


def test_periodic_task_is_scheduled_hourly() -> None:
    from codeq_site.beat_schedule import PERIODIC_TASKS

    assert PERIODIC_TASKS["pipeline"] == ("pipeline.run", 3600.0)


def test_synthetic_history_is_written_for_existing_tenants(call_pipeline: Any, audit: Audit, two_tenants: None) -> None:
    output = call_pipeline("generate", "--tasks", "200", "--days", "3", "--seed", "5")
    total = audit.query("SELECT count(*) FROM queues_attempt")[0][0]
    assert output.strip() == f"Wrote {total} attempts to the audit"
    assert total > 200
    assert {tid for (tid,) in audit.query("SELECT DISTINCT tenant_id FROM queues_attempt")} == {"acme0001", "beta0001"}


def test_files_of_a_table_are_printed(call_pipeline: Any, audit: Audit, two_tenants: None) -> None:
    audit.add([build_attempt(), build_attempt(tenant_id="beta0001")])
    call_pipeline("run", "ingest", "attempts")
    assert len(call_pipeline("files", "attempts").split()) == 2
    (file,) = call_pipeline("files", "attempts", "--tenant", "acme").split()
    assert file.startswith("file:///")
    assert Path(file.removeprefix("file://")).exists()
    with pytest.raises(CommandError, match="no tenant"):
        call_pipeline("files", "attempts", "--tenant", "nobody")


def test_lake_is_in_the_data_directory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert services.lake_url() == str(settings.conf().home_path / "lake")


def test_console_shows_rows_and_allows_no_changes(call_pipeline: Any, audit: Audit, two_tenants: None) -> None:
    audit.add([build_attempt(), build_dead_attempt()])
    create_delivery()
    call_pipeline("run")
    client = Client()
    client.force_login(UserFactory(is_superuser=True))
    for model in [*MARTS.values(), RunLog]:
        name = f"admin:pipeline_{model._meta.model_name}"
        response = client.get(reverse(f"{name}_changelist"))
        assert response.status_code == 200
        row = model.objects.first()
        assert row
        assert reverse(f"{name}_change", args=[row.pk]) in response.content.decode()
        assert client.get(reverse(f"{name}_changelist") + "?q=ren").status_code == 200
        assert client.get(reverse(f"{name}_change", args=[row.pk])).status_code == 200
        assert client.get(reverse(f"{name}_add")).status_code == 403
        assert client.post(reverse(f"{name}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
        assert client.post(reverse(f"{name}_change", args=[row.pk]), {}).status_code == 403
    usage = reverse("admin:pipeline_usage_changelist")
    assert "acme<" in client.get(usage).content.decode().replace(" ", "").replace("\n", "")
    # History is kept after its tenant is deleted.
    Tenant.objects.filter(slug="acme").delete()
    assert "acme0001" in client.get(usage).content.decode()


def create_delivery(statuses: tuple[int | None, ...] = (200, 500, None)) -> None:
    delivery = DeliveryFactory(
        tenant_id="acme0001", url="https://a.example/hook?x=1", status="delivered", created_at=at("10:00")
    )
    for number, status in enumerate(statuses, 1):
        DeliveryAttemptFactory(
            delivery=delivery, number=number, started_at=at("10:00"), duration_ms=100 * number, status_code=status,
            answer="CANARY",
        )  # fmt: skip


def test_deliveries_are_counted_in_their_mart(call_pipeline: Any, lake: Lake, audit: Audit, two_tenants: None) -> None:
    create_delivery()
    # The delivery of this attempt was deleted, so its tenant is unknown.
    DeliveryAttemptFactory(delivery=None, delivery_id=uuid.uuid4(), started_at=at("10:00"))
    call_pipeline("run", "ingest", "deliveries", "webhooks", "publish")
    row = WebhookHealth.objects.get()
    assert (row.endpoint, row.hour, row.tenant_id) == ("https://a.example/hook", at("10:00"), "acme0001")
    assert (row.attempts, row.delivered, row.refused, row.unreachable) == (3, 1, 1, 1)
    assert (row.latency_p50_ms, row.latency_max_ms) == (100, 200)
    assert RunLog.objects.get(job="ingest").quarantined == 1
    assert not any(b"CANARY" in Path(f.removeprefix("file://")).read_bytes() for f in files(lake.url, "deliveries"))


@pytest.mark.spec("PIP-4", "Staff see the marts of their own tenants only")
def test_staff_see_only_the_rows_of_their_tenants(call_pipeline: Any, audit: Audit, two_tenants: None) -> None:
    audit.add([build_attempt(), build_attempt(tenant_id="beta0001", command="beta-canary")])
    call_pipeline("run", "ingest", "attempts", "throughput", "publish")
    client = Client()
    client.force_login(TenantMembershipFactory(tenant_id="acme0001").user)
    page = client.get(reverse("admin:pipeline_throughput_changelist")).content.decode()
    assert "render" in page
    assert "beta-canary" not in page
    foreign = Throughput.objects.get(tenant_id="beta0001")
    response = client.get(reverse("admin:pipeline_throughput_change", args=[foreign.pk]), follow=True)
    assert "beta-canary" not in response.content.decode()
    assert client.get(reverse("admin:pipeline_runlog_changelist")).status_code == 403
