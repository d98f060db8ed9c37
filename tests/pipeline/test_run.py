"""The pipeline as an operator meets it: the command, the hourly run, the log, the marts in the console."""

from __future__ import annotations

import io
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from codeq_site import conf as settings
from pipeline import beat, services
from pipeline.models import MARTS, Failure, RunLog, Throughput, WebhookHealth
from pipeline.spark import jobs
from pipeline.spark.lake import Lake, files
from tenants.models import Tenant, TenantMembership
from tests.pipeline.history import Audit, at, attempt, counts
from tests.pipeline.test_transforms import dead
from tests.waiting import until
from webhooks.models import Delivery, DeliveryAttempt


@pytest.fixture
def command(spark: Any, lake: Lake, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`manage.py pipeline …` on the tests' session and lake; answers what it printed."""
    monkeypatch.setattr(services, "start_spark", lambda settings: spark)

    def call(*words: str) -> str:
        said = io.StringIO()
        call_command("pipeline", "--lake", lake.url, *words, stdout=said, stderr=said)
        return said.getvalue()

    return call


@pytest.fixture
def two_tenants(transactional_db: None) -> None:
    for slug in ("acme", "beta"):
        Tenant.objects.create(tid=f"{slug}0001", slug=slug)


@pytest.mark.spec("PIP-1", "One command brings history into marts, and every job is on record")
def test_a_run_fills_the_marts_and_the_log(command: Any, lake: Lake, audit: Audit, two_tenants: None) -> None:
    audit.add([attempt(), dead(error="boom 7"), attempt(outcome="?"), attempt(tenant_id="beta0001")])
    said = command("run")
    written = sum(log.rows_out for log in RunLog.objects.all())
    assert said.strip().splitlines()[-1] == f"{len(jobs.JOBS)} jobs, {written} rows written"
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


def test_one_job_runs_alone_and_days_are_asked_for(command: Any, lake: Lake, audit: Audit) -> None:
    audit.add([attempt()])
    assert "1 jobs, 1 rows written" in command("run", "ingest")
    assert counts(lake, "raw") == {"2026-03-10/acme0001": 1}
    assert "1 jobs, 1 rows written" in command("run", "ingest", "--since", "2026-03-10", "--until", "2026-03-11")
    assert "1 jobs, 0 rows written" in command("run", "ingest")
    with pytest.raises(CommandError, match="no such job: nonsense"):
        command("run", "nonsense")


def test_a_job_that_fails_is_on_record_with_its_reason(
    command: Any, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(context: Any) -> Any:
        raise RuntimeError("the disk is full\n\nJVM stacktrace:\nat java.lang.Thread")

    monkeypatch.setitem(jobs.JOBS, "attempts", explode)
    with pytest.raises(RuntimeError, match="the disk is full"):
        command("run")
    assert {log.job: log.state for log in RunLog.objects.all()} == {"ingest": "succeeded", "attempts": "failed"}
    assert RunLog.objects.get(job="attempts").error == "the disk is full"
    # What a killed process left as running is closed by the next run.
    RunLog.objects.filter(job="ingest").update(state="running", ended_at=None)
    monkeypatch.undo()

    def none(settings: Any) -> Any:
        raise RuntimeError("Spark does not start")

    monkeypatch.setattr(services, "start_spark", none)
    with pytest.raises(RuntimeError, match="does not start"):
        command("run", "ingest")
    assert not RunLog.objects.filter(state="running").exists()


def test_a_lake_out_of_reach_is_on_record_without_javas_stack(command: Any, audit: Audit) -> None:
    with pytest.raises(Exception, match="s3a"):
        command("--lake", "s3a://bucket/lake", "run")
    log = RunLog.objects.get()
    assert (log.job, log.state) == ("ingest", "failed")
    assert "S3AFileSystem not found" in log.error
    assert "\tat " not in log.error


@pytest.mark.spec("BEA-1", "The pipeline runs once at a time")
def test_of_two_runs_the_second_says_so_and_does_nothing(command: Any, audit: Audit) -> None:
    with services.acquire_run_lock():
        assert command("run").strip() == "Another run of the pipeline is at work."
    assert not RunLog.objects.exists()
    assert "jobs" in command("run", "ingest")


def test_the_turn_ends_with_its_process(audit: Audit) -> None:
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

    def is_given_back() -> bool:
        try:
            with services.acquire_run_lock():
                return True
        except services.AlreadyRunning:
            return False

    until(is_given_back, every=0.1)


class FakeTurn:
    def __init__(self) -> None:
        self.renewed = 0

    def renew(self) -> bool:
        self.renewed += 1
        return True


def hourly(monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[str, int]:
    """The beat's run with another program in the place of `manage.py pipeline run`."""
    real, turn = subprocess.Popen, FakeTurn()
    monkeypatch.setattr(beat, "LOCK_SECONDS", 0.4)
    monkeypatch.setattr(beat.subprocess, "Popen", lambda _, **more: real([sys.executable, "-c", script], **more))
    return beat.run_in_process(turn), turn.renewed


def test_the_hourly_run_keeps_its_turn_and_says_what_the_run_said(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time; time.sleep(0.5); print('ingest: …'); print('9 jobs, 4 rows written')"
    said, renewed = hourly(monkeypatch, script)
    assert said == "9 jobs, 4 rows written"
    assert renewed >= 2


def test_an_hourly_run_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="ended with 3: no space left"):
        hourly(monkeypatch, "import sys; print('no space left'); sys.exit(3)")


def test_the_hourly_run_is_on_the_schedule() -> None:
    from codeq_site.celery import SCHEDULE

    assert SCHEDULE["pipeline"] == ("pipeline.run", 3600.0)


def test_invented_history_goes_into_the_audit_of_real_tenants(command: Any, audit: Audit, two_tenants: None) -> None:
    said = command("generate", "--tasks", "200", "--days", "3", "--seed", "5")
    total = audit.ask("SELECT count(*) FROM queues_attempt")[0][0]
    assert said.strip() == f"{total} attempts are in the audit"
    assert total > 200
    assert {tid for (tid,) in audit.ask("SELECT DISTINCT tenant_id FROM queues_attempt")} == {"acme0001", "beta0001"}


def test_a_tables_files_are_told(command: Any, audit: Audit, two_tenants: None) -> None:
    audit.add([attempt(), attempt(tenant_id="beta0001")])
    command("run", "ingest", "attempts")
    assert len(command("files", "attempts").split()) == 2
    (file,) = command("files", "attempts", "--tenant", "acme").split()
    assert file.startswith("file:///")
    assert Path(file.removeprefix("file://")).exists()
    with pytest.raises(CommandError, match="no tenant"):
        command("files", "attempts", "--tenant", "nobody")


def test_an_unknown_lake_setting_is_the_home_directorys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert services.lake_url() == str(settings.conf().home_path / "lake")


def test_the_console_shows_rows_and_changes_none(command: Any, audit: Audit, two_tenants: None) -> None:
    audit.add([attempt(), dead()])
    deliver(audit)
    command("run")
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root", password="x"))
    for model in [*MARTS.values(), RunLog]:
        name = f"admin:pipeline_{model._meta.model_name}"
        listed = client.get(reverse(f"{name}_changelist"))
        assert listed.status_code == 200
        row = model.objects.first()
        assert row
        assert reverse(f"{name}_change", args=[row.pk]) in listed.content.decode()
        assert client.get(reverse(f"{name}_changelist") + "?q=ren").status_code == 200
        assert client.get(reverse(f"{name}_change", args=[row.pk])).status_code == 200
        assert client.get(reverse(f"{name}_add")).status_code == 403
        assert client.post(reverse(f"{name}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
        assert client.post(reverse(f"{name}_change", args=[row.pk]), {}).status_code == 403
    usage = reverse("admin:pipeline_usage_changelist")
    assert "acme<" in client.get(usage).content.decode().replace(" ", "").replace("\n", "")
    # History outlives its tenant.
    Tenant.objects.filter(slug="acme").delete()
    assert "acme0001" in client.get(usage).content.decode()


def deliver(audit: Audit, statuses: tuple[int | None, ...] = (200, 500, None)) -> None:
    delivery = Delivery.objects.create(
        tenant_id="acme0001", task_id=uuid.uuid4(), command="render", url="https://a.example/hook?x=1",
        address="https://a.example/hook", host="a.example:443", body="{}", status="delivered", due_at=at("10:00"),
        created_at=at("10:00"),
    )  # fmt: skip
    DeliveryAttempt.objects.bulk_create(
        DeliveryAttempt(
            delivery=delivery, number=number, started_at=at("10:00"), duration_ms=100 * number, status_code=status,
            answer="CANARY",
        )
        for number, status in enumerate(statuses, 1)
    )  # fmt: skip


def test_deliveries_reach_their_mart(command: Any, lake: Lake, audit: Audit, two_tenants: None) -> None:
    deliver(audit)
    # Its delivery is gone: nobody knows whose it was.
    DeliveryAttempt.objects.create(delivery_id=uuid.uuid4(), number=1, started_at=at("10:00"), duration_ms=1)
    command("run", "ingest", "deliveries", "webhooks", "publish")
    row = WebhookHealth.objects.get()
    assert (row.endpoint, row.hour, row.tenant_id) == ("https://a.example/hook", at("10:00"), "acme0001")
    assert (row.attempts, row.delivered, row.refused, row.unreachable) == (3, 1, 1, 1)
    assert (row.latency_p50_ms, row.latency_max_ms) == (100, 200)
    assert RunLog.objects.get(job="ingest").quarantined == 1
    assert not any(b"CANARY" in Path(f.removeprefix("file://")).read_bytes() for f in files(lake.url, "deliveries"))


@pytest.mark.spec("PIP-4", "Staff see the marts of their tenants and of no other")
def test_staff_see_their_tenants_rows_only(command: Any, audit: Audit, two_tenants: None) -> None:
    audit.add([attempt(), attempt(tenant_id="beta0001", command="beta-canary")])
    command("run", "ingest", "attempts", "throughput", "publish")
    staff = get_user_model().objects.create_user("staff", password="x", is_staff=True)
    TenantMembership.objects.create(tenant_id="acme0001", user=staff)
    client = Client()
    client.force_login(staff)
    page = client.get(reverse("admin:pipeline_throughput_changelist")).content.decode()
    assert "render" in page
    assert "beta-canary" not in page
    foreign = Throughput.objects.get(tenant_id="beta0001")
    shown = client.get(reverse("admin:pipeline_throughput_change", args=[foreign.pk]), follow=True)
    assert "beta-canary" not in shown.content.decode()
    assert client.get(reverse("admin:pipeline_runlog_changelist")).status_code == 403
