"""Data for the screenshots: `CODEQ_HOME=… python -m tests.browser.demo_data`.

It fills a running installation with live tasks and with a history.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")

MINUTE = timedelta(minutes=1)
HOURS = 24 * 7
ERRORS = {
    "connection to 10.0.3.{n} timed out after 30000 ms": 8,
    "HTTP 502 from upstream while reading https://files.example.com/o/{n}.pdf": 4,
    "KeyError: 'invoice_{n}'": 2,
    'Traceback (most recent call last):\n  File "worker.py", line {n}, in run\nValueError: negative amount -{n}': 1,
}


class QueueProfile(NamedTuple):
    """A queue: its tasks now, its rate per minute and its mean durations in the past."""

    waiting: int
    delayed: int
    dead: int
    per_minute: int
    failed_share: float
    wait_seconds: float
    run_seconds: float


QUEUES = {
    "acme": {
        "invoice.render": QueueProfile(132, 14, 37, 180, 0.03, 9.0, 1.4),
        "mail.send": QueueProfile(9, 3, 4, 95, 0.01, 0.4, 0.2),
        "thumbnail": QueueProfile(31, 0, 0, 410, 0.0, 1.1, 0.6),
    },
    "northwind": {
        "import.orders": QueueProfile(2140, 60, 118, 320, 0.09, 240.0, 6.0),
        "webhook.fanout": QueueProfile(26, 0, 0, 210, 0.004, 2.0, 0.1),
    },
}


def main() -> None:
    import django

    django.setup()
    random.seed(6)
    from queues.models import AuditedResult
    from tests.waiting import until

    dead = 0
    for slug, queues in QUEUES.items():
        tenant = _provision(slug)
        for command, profile in queues.items():
            _create_samples(tenant.tid, command, profile)
            _create_live_tasks(tenant, command, profile)
            dead += profile.dead
    until(lambda: AuditedResult.objects.filter(is_dead=True).count() == dead, 30)
    for row in AuditedResult.objects.filter(is_dead=True):
        ago = timedelta(hours=20 * random.random() ** 2)
        AuditedResult.objects.filter(pk=row.pk).update(ended_at=row.ended_at - ago)
    _create_settings(_provision("acme"))
    _run_pipeline()
    dead_letter = AuditedResult.objects.filter(tenant__slug="acme", is_dead=True, error__contains="502").first()
    print(json.dumps({"dead": str(dead_letter.pk), **_create_example_tasks(_provision("acme")), **_create_bulk_jobs()}))


def _run_pipeline() -> None:
    """Generate a month of history and run the pipeline, for the charts."""
    from django.core.management import call_command

    first = (datetime.now(UTC) - timedelta(days=29)).date()
    quiet = {"stdout": open(os.devnull, "w")}  # noqa: SIM115 - open until the process ends
    call_command("pipeline", "generate", "--tasks", "400000", "--days", "30", "--first-day", str(first), **quiet)
    call_command("pipeline", "run", **quiet)


def _create_bulk_jobs() -> dict[str, str]:
    """Create three bulk jobs: one running, one that can be undone, one failed."""
    from queues.deadletters import bulk_jobs
    from queues.deadletters.queries import Filter
    from queues.models import BulkJob
    from queues.search import pagination
    from tests.waiting import until

    acme, northwind = _provision("acme"), _provision("northwind")
    path = Filter(json_path='$.lines[*] ? (@.sku like_regex "(A-?)+$")')
    failed = bulk_jobs.start(northwind, "replay", path, actor="nora", reason="orders of the old catalogue")
    bulk_jobs.cancel(None, str(failed.pk))
    began = failed.created_at - timedelta(seconds=31)
    BulkJob.objects.filter(pk=failed.pk).update(
        state="failed", error=pagination.TOO_LONG, done=14, total=None, created_at=began, started_at=began
    )
    completed = bulk_jobs.start(
        acme, "replay", Filter(command="mail.send"), actor="ada", reason="the mail server is back"
    )
    until(lambda: bulk_jobs.find(None, str(completed.pk)).is_over, 30)
    options = {"actor": "admin", "reason": "the import's disk is back"}
    job = bulk_jobs.start(northwind, "replay", Filter(command="import.orders"), rate_per_second=4, **options)
    until(lambda: bulk_jobs.find(None, str(job.pk)).done > 40, 60)
    return {"job": str(job.pk), "completed": str(completed.pk), "failed": str(failed.pk)}


def _create_example_tasks(acme: Any) -> dict[str, str]:
    """Create a delayed task and a completed one with three attempts and a webhook."""
    from queues import services
    from queues.domain import NewResult, NewTask, TaskStatus
    from queues.models import AuditedResult
    from tests.waiting import until
    from webhooks.models import Delivery

    payload = '{"order":48117,"customer":{"id":412,"name":"Contoso"},"lines":[{"sku":"A-17","qty":2,"price":19.90}]}'
    hook = "https://hooks.example.com/codeq?of=contoso"
    new = NewTask(command="invoice.print", payload=payload, priority=9, webhook=hook)
    [enqueued] = services.enqueue(acme, [new]).run_sync()
    for worker, error in (("worker-3", "printer 2 is out of paper"), ("worker-9", "printer 2 is out of paper")):
        [task] = services.claim(acme, ["invoice.print"], worker).run_sync().tasks
        services.nack(acme, task.id, worker, delay_seconds=0, reason=error).run_sync()
    [task] = services.claim(acme, ["invoice.print"], "worker-9").run_sync().tasks
    artifacts = (
        b'[{"name":"invoice-48117.pdf","url":"https://files.example.com/48117.pdf","contentType":"application/pdf"}]'
    )
    result = NewResult(
        task_id=task.id, status=TaskStatus.COMPLETED, result=b'{"pages":2,"printer":"4"}', artifacts=artifacts
    )  # fmt: skip
    services.submit(acme, "worker-9", [result]).run_sync()
    until(lambda: AuditedResult.objects.filter(pk=task.id).exists(), 30)
    until(lambda: Delivery.objects.filter(task_id=task.id).exists(), 30)
    _create_deliveries(acme, task.id)
    [waiting] = services.enqueue(acme, [NewTask(command="mail.send", payload=payload, delay_ms=5_400_000)]).run_sync()
    delivery = Delivery.objects.get(task_id=task.id)
    return {"acme": acme.tid, "done": enqueued.task.id, "waiting": waiting.task.id, "delivery": str(delivery.pk)}


def _create_deliveries(acme: Any, task_id: str) -> None:
    """Create delivered, given up and pending deliveries, failing endpoints, and subscriptions."""
    from tests.factories import (
        CircuitFactory,
        DeliveryAttemptFactory,
        DeliveryFactory,
        EndpointFactory,
        SubscriptionFactory,
    )
    from webhooks.models import Delivery, DeliveryAttempt

    now = datetime.now(UTC)
    first = Delivery.objects.get(task_id=task_id)
    Delivery.objects.filter(pk=first.pk).update(
        status="delivered",
        attempts_since_replay=2,
        attempts=2,
        last_status=200,
        last_error="",
        ended_at=now,
        reservation=None,
    )
    DeliveryAttempt.objects.filter(delivery=first).delete()
    for number, code, error, answer in (
        (1, 503, "503 Service Unavailable", "upstream is restarting"),
        (2, 200, "", "ok"),
    ):
        DeliveryAttemptFactory(
            delivery=first, number=number, started_at=now - (3 - number) * MINUTE, duration_ms=37 * number,
            status_code=code, error=error, answer=answer,
        )  # fmt: skip
    for number in range(14):
        status = ("delivered", "delivered", "delivered", "given up", "pending")[number % 5]
        broken = "old" if status == "given up" else "hooks"
        DeliveryFactory(
            tenant_id=acme.tid, command=("invoice.render", "mail.send")[number % 2],
            url=f"https://{broken}.example.com/codeq", status=status,
            attempts_since_replay=1 + number % 3, attempts=1 + number % 3,
            last_status=200 if status == "delivered" else None, due_at=now + timedelta(hours=1),
            last_error="" if status == "delivered" else "connection refused", created_at=now - number * MINUTE,
            ended_at=None if status == "pending" else now,
        )  # fmt: skip
    EndpointFactory(
        tenant_id=acme.tid, address="https://old.example.com/codeq", description="the former billing system",
        failing_since=now - timedelta(days=2),
    )  # fmt: skip
    EndpointFactory(
        tenant_id=acme.tid, address="https://gone.example.com/codeq", is_enabled=False, disabled_at=now,
        disabled_because="The endpoint answered 410 Gone.",
    )  # fmt: skip
    CircuitFactory(tenant_id=acme.tid, host="old.example.com:443", failures=12, paused_until=now + MINUTE)
    for number, mode in enumerate(("fanout", "group", "hash")):
        SubscriptionFactory(
            tenant_id=acme.tid, worker=f"worker-{number + 3}", callback_url=f"https://w-{number + 3}.example.com/wake",
            event_types=["invoice.render", "mail.send"], mode=mode, group="printers" if mode == "group" else "",
            ttl_seconds=86_400, min_interval_seconds=5, notified=17 * number,
            last_status=204 if number else None,
        )  # fmt: skip


def _create_settings(acme: Any) -> None:
    """Create the tenant's members, log, issuer, signing secret and policies."""
    from queues import policies
    from queues.policies import Policy
    from tenants import services
    from tests.factories import TenantIssuerFactory, TenantMembershipFactory, UserFactory

    for name, role in (("ada", "admin"), ("oscar", "operator"), ("vera", "viewer")):
        user = UserFactory(username=name, email=f"{name}@example.com")
        TenantMembershipFactory(user=user, tenant_id=acme.tid, role=role)
        _log(user, acme, "Paused queue mail.send: the mail server is being moved")
        _log(user, acme, "Resumed queue mail.send: it has been moved")
    services.rotate_signing_secret(acme.slug)
    issuer = "https://login.example.com/acme"
    TenantIssuerFactory(tenant_id=acme.tid, issuer=issuer, jwks_url=f"{issuer}/jwks.json")
    policies.put(acme, "invoice.render", Policy(max_consumers=40, priority_tiers=(0, 5, 9)), actor="ada")
    policies.put(acme, "mail.send", Policy(max_attempts=8, backoff="fixed", backoff_base_seconds=30), actor="ada")


def _log(user: Any, tenant: Any, message: str) -> None:
    from tests.factories import LogEntryFactory

    LogEntryFactory(user=user, tenant=None, object_id=tenant.tid, object_repr=tenant.slug, change_message=message)


def _provision(slug: str) -> Any:
    from tenants import services

    return services.provision(slug)


def _create_samples(tid: str, command: str, profile: QueueProfile) -> None:
    from queues.models import QueueSample

    now = datetime.now(UTC).replace(second=0, microsecond=0)
    rows = []
    for minutes_ago in range(HOURS * 60, 0, -1):
        wave = 1 + 0.5 * math.sin(minutes_ago / 47) + 0.25 * math.sin(minutes_ago / 229) + 0.2 * random.random()
        ended = int(profile.per_minute * wave)
        unsuccessful = int(ended * profile.failed_share * (0.5 + random.random()))
        rows.append(
            QueueSample(
                tenant_id=tid,
                command=command,
                at=now - minutes_ago * MINUTE,
                ready=int(profile.waiting * wave * 0.8),
                delayed=int(profile.delayed * wave),
                in_progress=min(5, profile.waiting),
                dead=max(0, profile.dead - minutes_ago // 60),
                arrived=ended + random.randint(-5, 9),
                completed=ended - unsuccessful,
                failed=unsuccessful // 4,
                died=unsuccessful // 5,
                returned=unsuccessful - unsuccessful // 4 - unsuccessful // 5,
                cancelled=random.randint(0, 2),
                waits=_histogram(profile.wait_seconds * wave, ended),
                runs=_histogram(profile.run_seconds, ended),
            )
        )
    QueueSample.objects.bulk_create(rows, batch_size=2000, ignore_conflicts=True)


def _histogram(typical: float, count: int) -> list[int]:
    from queues.stats import histogram

    bins: Counter[int] = Counter()
    for step in range(40):
        seconds = random.lognormvariate(math.log(typical), 0.7)
        bins[max(0, min(histogram.LAST_BIN, int(2 * math.log2(max(seconds * 1000, 1)))))] += 1 + count * step // 800
    return histogram.pack(bins)


def _create_live_tasks(tenant: Any, command: str, profile: QueueProfile) -> None:
    from queues import services

    _enqueue(tenant, command, profile.dead, max_attempts=1)
    for task in _claim(tenant, command, profile.dead):
        error = random.choices(list(ERRORS), list(ERRORS.values()))[0].format(n=random.randint(1, 250))
        services.nack(tenant, task.id, task.worker, reason=error).run_sync()
    _enqueue(tenant, command, profile.waiting)
    _enqueue(tenant, command, profile.delayed, delay_ms=3_600_000)
    services.claim(tenant, [command], "worker-7", count=3, lease_seconds=1800).run_sync()
    services.claim(tenant, [command], "worker-12", count=2, lease_seconds=900).run_sync()


def _claim(tenant: Any, command: str, count: int) -> list[Any]:
    from queues import services

    tasks: list[Any] = []
    while len(tasks) < count:
        worker = f"worker-{random.randint(1, 12)}"
        tasks += services.claim(tenant, [command], worker, count=min(20, count - len(tasks))).run_sync().tasks
    return tasks


def _enqueue(tenant: Any, command: str, count: int, **fields: Any) -> None:
    from queues import services
    from queues.domain import NewTask

    new = [
        NewTask(
            command=command,
            priority=random.choice((0, 0, 0, 5, 9)),
            payload=f'{{"order":{48_000 + n},"customer":{{"id":{random.randint(100, 999)},"name":"Contoso"}},'
            f'"lines":[{{"sku":"A-{n}","qty":2,"price":19.90}}]}}',
            **fields,
        )
        for n in range(count)
    ]
    for start in range(0, count, 500):
        services.enqueue(tenant, new[start : start + 500]).run_sync()


if __name__ == "__main__":
    main()
