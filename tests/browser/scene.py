"""A past and a present for screenshots: `CODEQ_HOME=… python -m tests.browser.scene` fills a running installation."""

from __future__ import annotations

import json
import math
import os
import random
import uuid
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


class Fare(NamedTuple):
    """How a queue fares: what is in it now, what passes a minute, the share that fails, the typical wait and run."""

    waiting: int
    delayed: int
    dead: int
    per_minute: int
    failing: float
    wait: float
    run: float


QUEUES = {
    "acme": {
        "invoice.render": Fare(132, 14, 37, 180, 0.03, 9.0, 1.4),
        "mail.send": Fare(9, 3, 4, 95, 0.01, 0.4, 0.2),
        "thumbnail": Fare(31, 0, 0, 410, 0.0, 1.1, 0.6),
    },
    "northwind": {
        "import.orders": Fare(2140, 60, 118, 320, 0.09, 240.0, 6.0),
        "webhook.fanout": Fare(26, 0, 0, 210, 0.004, 2.0, 0.1),
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
        tenant = _tenant(slug)
        for command, fare in queues.items():
            _past(tenant.tid, command, fare)
            _present(tenant, command, fare)
            dead += fare.dead
    until(lambda: AuditedResult.objects.filter(is_dead=True).count() == dead, 30)
    for row in AuditedResult.objects.filter(is_dead=True):
        ago = timedelta(hours=20 * random.random() ** 2)
        AuditedResult.objects.filter(pk=row.pk).update(ended_at=row.ended_at - ago)
    _around(_tenant("acme"))
    _history()
    dead_letter = AuditedResult.objects.filter(tenant__slug="acme", is_dead=True, error__contains="502").first()
    print(json.dumps({"dead": str(dead_letter.pk), **_worked(_tenant("acme")), **_mended()}))


def _history() -> None:
    """A month for the charts, by the pipeline itself."""
    from django.core.management import call_command

    first = (datetime.now(UTC) - timedelta(days=29)).date()
    quiet = {"stdout": open(os.devnull, "w")}  # noqa: SIM115 - for the life of this process
    call_command("pipeline", "generate", "--tasks", "400000", "--days", "30", "--first-day", str(first), **quiet)
    call_command("pipeline", "run", **quiet)


def _mended() -> dict[str, str]:
    """Jobs: one that is half done, one that is over and can be undone, one that could not go on."""
    from queues.deadletters import bulk_jobs
    from queues.deadletters.queries import Filter
    from queues.models import BulkJob
    from queues.search import pagination
    from tests.waiting import until

    acme, northwind = _tenant("acme"), _tenant("northwind")
    path = Filter(json_path='$.lines[*] ? (@.sku like_regex "(A-?)+$")')
    failed = bulk_jobs.start(northwind, "replay", path, actor="nora", reason="orders of the old catalogue")
    bulk_jobs.cancel(None, str(failed.pk))
    began = failed.created_at - timedelta(seconds=31)
    BulkJob.objects.filter(pk=failed.pk).update(
        state="failed", error=pagination.TOO_LONG, done=14, total=None, created_at=began, started_at=began
    )
    over = bulk_jobs.start(acme, "replay", Filter(command="mail.send"), actor="ada", reason="the mail server is back")
    until(lambda: bulk_jobs.find(None, str(over.pk)).is_over, 30)
    asked = {"actor": "admin", "reason": "the import's disk is back"}
    job = bulk_jobs.start(northwind, "replay", Filter(command="import.orders"), rate_per_second=4, **asked)
    until(lambda: bulk_jobs.find(None, str(job.pk)).done > 40, 60)
    return {"job": str(job.pk), "over": str(over.pk), "failed": str(failed.pk)}


def _worked(acme: Any) -> dict[str, str]:
    """A task that ended well at its third attempt, with artifacts and somebody to tell; and one that waits."""
    from queues import services
    from queues.domain import NewResult, NewTask, Status
    from queues.models import AuditedResult
    from tests.waiting import until
    from webhooks.models import Delivery

    payload = '{"order":48117,"customer":{"id":412,"name":"Contoso"},"lines":[{"sku":"A-17","qty":2,"price":19.90}]}'
    hook = "https://hooks.example.com/codeq?of=contoso"
    new = NewTask(command="invoice.print", payload=payload, priority=9, webhook=hook)
    [made] = services.enqueue(acme, [new]).run_sync()
    for worker, error in (("worker-3", "printer 2 is out of paper"), ("worker-9", "printer 2 is out of paper")):
        [task] = services.claim(acme, ["invoice.print"], worker).run_sync().tasks
        services.nack(acme, task.id, worker, delay_seconds=0, reason=error).run_sync()
    [task] = services.claim(acme, ["invoice.print"], "worker-9").run_sync().tasks
    artifacts = (
        b'[{"name":"invoice-48117.pdf","url":"https://files.example.com/48117.pdf","contentType":"application/pdf"}]'
    )
    result = NewResult(
        task_id=task.id, status=Status.COMPLETED, result=b'{"pages":2,"printer":"4"}', artifacts=artifacts
    )  # fmt: skip
    services.submit(acme, "worker-9", [result]).run_sync()
    until(lambda: AuditedResult.objects.filter(pk=task.id).exists(), 30)
    until(lambda: Delivery.objects.filter(task_id=task.id).exists(), 30)
    _told(acme, task.id)
    [waiting] = services.enqueue(acme, [NewTask(command="mail.send", payload=payload, delay_ms=5_400_000)]).run_sync()
    delivery = Delivery.objects.get(task_id=task.id)
    return {"acme": acme.tid, "done": made.task.id, "waiting": waiting.task.id, "delivery": str(delivery.pk)}


def _told(acme: Any, task_id: str) -> None:
    """Deliveries as they go: made at the second try, on their way, given up; and an endpoint in trouble."""
    from webhooks.models import Circuit, Delivery, DeliveryAttempt, Endpoint, Subscription

    now = datetime.now(UTC)
    first = Delivery.objects.get(task_id=task_id)
    Delivery.objects.filter(pk=first.pk).update(
        status="delivered", tries=2, attempts=2, last_status=200, last_error="", ended_at=now, reservation=None
    )
    DeliveryAttempt.objects.filter(delivery=first).delete()
    for number, code, error, answer in (
        (1, 503, "503 Service Unavailable", "upstream is restarting"),
        (2, 200, "", "ok"),
    ):
        DeliveryAttempt.objects.create(
            delivery=first, number=number, started_at=now - (3 - number) * MINUTE, duration_ms=37 * number,
            status_code=code, error=error, answer=answer,
        )  # fmt: skip
    for number in range(14):
        status = ("delivered", "delivered", "delivered", "given up", "pending")[number % 5]
        broken = "old" if status == "given up" else "hooks"
        Delivery.objects.create(
            tenant_id=acme.tid, task_id=uuid.uuid4(), command=("invoice.render", "mail.send")[number % 2],
            url=f"https://{broken}.example.com/codeq", address=f"https://{broken}.example.com/codeq",
            host=f"{broken}.example.com", body="{}", status=status, tries=1 + number % 3, attempts=1 + number % 3,
            last_status=200 if status == "delivered" else None, due_at=now + timedelta(hours=1),
            last_error="" if status == "delivered" else "connection refused", created_at=now - number * MINUTE,
            ended_at=None if status == "pending" else now,
        )  # fmt: skip
    Endpoint.objects.create(
        tenant_id=acme.tid, address="https://old.example.com/codeq", description="the former billing system",
        failing_since=now - timedelta(days=2),
    )  # fmt: skip
    Endpoint.objects.create(
        tenant_id=acme.tid, address="https://gone.example.com/codeq", is_enabled=False, disabled_at=now,
        disabled_because="The endpoint answered 410 Gone.",
    )  # fmt: skip
    Circuit.objects.create(
        tenant_id=acme.tid, host="old.example.com", failures=12, paused_until=now + MINUTE, updated_at=now
    )
    for number, mode in enumerate(("fanout", "group", "hash")):
        Subscription.objects.create(
            tenant_id=acme.tid, worker=f"worker-{number + 3}", callback_url=f"https://w-{number + 3}.example.com/wake",
            event_types=["invoice.render", "mail.send"], mode=mode, group="printers" if mode == "group" else "",
            ttl_seconds=86_400, min_interval_seconds=5, expires_at=now + timedelta(days=1), notified=17 * number,
            last_status=204 if number else None,
        )  # fmt: skip


def _around(acme: Any) -> None:
    """Who looks after the tenant, who vouches for its callers, what was done to it, and what holds in its queues."""
    from django.contrib.auth.models import User

    from queues import policies
    from queues.policies import Policy
    from tenants import services
    from tenants.models import TenantIssuer, TenantMembership

    for name, role in (("ada", "admin"), ("oscar", "operator"), ("vera", "viewer")):
        user = User.objects.create_user(name, f"{name}@example.com", is_staff=True)
        TenantMembership.objects.create(user=user, tenant_id=acme.tid, role=role)
        _log(user, acme, "Paused queue mail.send: the mail server is being moved")
        _log(user, acme, "Resumed queue mail.send: it has been moved")
    services.rotate_signing_secret(acme.slug)
    issuer = "https://login.example.com/acme"
    TenantIssuer.objects.create(tenant_id=acme.tid, issuer=issuer, jwks_url=f"{issuer}/jwks.json")
    policies.put(acme, "invoice.render", Policy(max_consumers=40, priority_tiers=(0, 5, 9)), actor="ada")
    policies.put(acme, "mail.send", Policy(max_attempts=8, backoff="fixed", backoff_base_seconds=30), actor="ada")


def _log(user: Any, tenant: Any, message: str) -> None:
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    from tenants.models import Tenant

    LogEntry.objects.create(
        user=user, content_type=ContentType.objects.get_for_model(Tenant), object_id=tenant.tid,
        object_repr=tenant.slug, action_flag=CHANGE, change_message=message,
    )  # fmt: skip


def _tenant(slug: str) -> Any:
    from tenants import services

    return services.provision(slug)


def _past(tid: str, command: str, fare: Fare) -> None:
    from queues.models import QueueSample

    now = datetime.now(UTC).replace(second=0, microsecond=0)
    rows = []
    for back in range(HOURS * 60, 0, -1):
        wave = 1 + 0.5 * math.sin(back / 47) + 0.25 * math.sin(back / 229) + 0.2 * random.random()
        ended = int(fare.per_minute * wave)
        bad = int(ended * fare.failing * (0.5 + random.random()))
        rows.append(
            QueueSample(
                tenant_id=tid,
                command=command,
                at=now - back * MINUTE,
                ready=int(fare.waiting * wave * 0.8),
                delayed=int(fare.delayed * wave),
                in_progress=min(5, fare.waiting),
                dead=max(0, fare.dead - back // 60),
                arrived=ended + random.randint(-5, 9),
                completed=ended - bad,
                failed=bad // 4,
                died=bad // 5,
                returned=bad - bad // 4 - bad // 5,
                cancelled=random.randint(0, 2),
                waits=_times(fare.wait * wave, ended),
                runs=_times(fare.run, ended),
            )
        )
    QueueSample.objects.bulk_create(rows, batch_size=2000, ignore_conflicts=True)


def _times(typical: float, count: int) -> list[int]:
    from queues.stats import histogram

    bins: Counter[int] = Counter()
    for at in range(40):
        seconds = random.lognormvariate(math.log(typical), 0.7)
        bins[max(0, min(histogram.LAST_BIN, int(2 * math.log2(max(seconds * 1000, 1)))))] += 1 + count * at // 800
    return histogram.pack(bins)


def _present(tenant: Any, command: str, fare: Fare) -> None:
    from queues import services

    _enqueue(tenant, command, fare.dead, max_attempts=1)
    for task in _claim(tenant, command, fare.dead):
        error = random.choices(list(ERRORS), list(ERRORS.values()))[0].format(n=random.randint(1, 250))
        services.nack(tenant, task.id, task.worker, reason=error).run_sync()
    _enqueue(tenant, command, fare.waiting)
    _enqueue(tenant, command, fare.delayed, delay_ms=3_600_000)
    services.claim(tenant, [command], "worker-7", count=3, lease_seconds=1800).run_sync()
    services.claim(tenant, [command], "worker-12", count=2, lease_seconds=900).run_sync()


def _claim(tenant: Any, command: str, count: int) -> list[Any]:
    from queues import services

    tasks: list[Any] = []
    while len(tasks) < count:
        worker = f"worker-{random.randint(1, 12)}"
        tasks += services.claim(tenant, [command], worker, count=min(20, count - len(tasks))).run_sync().tasks
    return tasks


def _enqueue(tenant: Any, command: str, count: int, **asked: Any) -> None:
    from queues import services
    from queues.domain import NewTask

    new = [
        NewTask(
            command=command,
            priority=random.choice((0, 0, 0, 5, 9)),
            payload=f'{{"order":{48_000 + n},"customer":{{"id":{random.randint(100, 999)},"name":"Contoso"}},'
            f'"lines":[{{"sku":"A-{n}","qty":2,"price":19.90}}]}}',
            **asked,
        )
        for n in range(count)
    ]
    for at in range(0, count, 500):
        services.enqueue(tenant, new[at : at + 500]).run_sync()


if __name__ == "__main__":
    main()
