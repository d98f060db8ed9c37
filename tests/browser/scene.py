"""A past and a present for screenshots: `CODEQ_HOME=… python -m tests.browser.scene` fills a running installation."""

from __future__ import annotations

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
    _history()
    print(*_named(AuditedResult.objects.filter(tenant__slug="acme", is_dead=True, error__contains="502").first()))


def _history() -> None:
    """A month for the charts, by the pipeline itself."""
    from django.core.management import call_command

    first = (datetime.now(UTC) - timedelta(days=29)).date()
    quiet = {"stdout": open(os.devnull, "w")}  # noqa: SIM115 - for the life of this process
    call_command("pipeline", "generate", "--tasks", "400000", "--days", "30", "--first-day", str(first), **quiet)
    call_command("pipeline", "run", **quiet)


def _named(dead: Any) -> tuple[str, str, str]:
    """What the pictures are taken of: a tenant, a dead letter of it, and a job that is half done."""
    from queues import bulk
    from queues.deadletters import Filter
    from tests.waiting import until

    northwind = _tenant("northwind")
    asked = {"actor": "admin", "reason": "the import's disk is back"}
    job = bulk.start(northwind, "replay", Filter(command="import.orders"), rate_per_second=4, **asked)
    until(lambda: bulk.find(None, str(job.pk)).done > 40, 30)
    return dead.tenant_id, str(dead.pk), str(job.pk)


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
    from queues import spread

    bins: Counter[int] = Counter()
    for at in range(40):
        seconds = random.lognormvariate(math.log(typical), 0.7)
        bins[max(0, min(spread.LAST, int(2 * math.log2(max(seconds * 1000, 1)))))] += 1 + count * at // 800
    return spread.pack(bins)


def _present(tenant: Any, command: str, fare: Fare) -> None:
    from queues import services

    _enqueue(tenant, command, fare.dead, max_attempts=1)
    for task in _claim(tenant, command, fare.dead):
        error = random.choices(list(ERRORS), list(ERRORS.values()))[0].format(n=random.randint(1, 250))
        services.nack(tenant, task.id, task.worker, reason=error).now()
    _enqueue(tenant, command, fare.waiting)
    _enqueue(tenant, command, fare.delayed, delay_ms=3_600_000)
    services.claim(tenant, [command], "worker-7", count=3, lease_seconds=1800).now()
    services.claim(tenant, [command], "worker-12", count=2, lease_seconds=900).now()


def _claim(tenant: Any, command: str, count: int) -> list[Any]:
    from queues import services

    tasks: list[Any] = []
    while len(tasks) < count:
        worker = f"worker-{random.randint(1, 12)}"
        tasks += services.claim(tenant, [command], worker, count=min(20, count - len(tasks))).now().tasks
    return tasks


def _enqueue(tenant: Any, command: str, count: int, **asked: Any) -> None:
    from queues import services
    from queues.task import NewTask

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
        services.enqueue(tenant, new[at : at + 500]).now()


if __name__ == "__main__":
    main()
