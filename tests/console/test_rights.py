"""Every path of the console: whose data it shows, who may act, and that it asks only so much of the database."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import msgspec
import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from console import urls
from core import errors
from queues import artifacts, policies, selectors
from queues.deadletters import bulk_jobs
from queues.deadletters.queries import Filter
from queues.domain import Task
from queues.models import AuditedResult, BulkJob, QueuePolicy
from queues.policies import Policy
from queues.stats.sampler import sample
from tests.console.conftest import Login, die, drain
from tests.factories import BulkJobFactory, DeliveryFactory
from tests.fixtures.queues import Queue
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db
ISOLATED = pytest.mark.spec("ADM-4", "A tenant's staff sees nothing of another on any page, count or export")
RIGHTS = pytest.mark.spec("ADM-4", "A viewer sees and cannot act; an operator acts, with a reason, on record")
CANARY = "kanarie"
COUNTS = Path(__file__).with_name("query_counts.json")
MOST = 20


class World:
    """A queue with something in every place, and the words that pages and acts about it are asked with."""

    def __init__(self, queue: Queue, word: str) -> None:
        payload, error = json.dumps({"secret": f"{word}-payload"}), f"{word}-error 7"
        self.queue, self.word = queue, word
        self.dead = die(queue, 3, payload, error)
        self.done = queue.enqueue(payload, webhook=f"https://{word}.example.com/hook")
        queue.claim(f"{word}-worker")
        new = [artifacts.NewArtifact(name=f"{word}.txt", content=f"{word}-artifact".encode())]
        kept, _ = artifacts.store(queue.tenant.tid, self.done.id, new)
        self.artifact = kept[0].url.rpartition("/")[2]
        said = json.dumps({"said": f"{word}-result"}).encode()
        queue.complete(self.done, f"{word}-worker", said, artifacts=msgspec.json.encode(kept))
        self.held = queue.enqueue(payload, priority=9)
        queue.claim(f"{word}-worker")
        self.waiting = queue.enqueue(payload)
        queue.enqueue(payload, delay_ms=3_600_000)
        drain()
        sample(lambda: True, datetime.now(UTC))
        policies.put(queue.tenant, queue.command, Policy(retention_seconds=7200), actor=f"{word}-actor")
        self.job = bulk_jobs.start(queue.tenant, "replay", Filter(), actor=f"{word}-actor", reason=f"{word}-reason")
        self.replayed = BulkJobFactory(
            tenant_id=queue.tenant.tid, state="done", done=1, actor=f"{word}-actor", ended_at=datetime.now(UTC)
        )
        if not Delivery.objects.filter(task_id=self.done.id).exists():
            DeliveryFactory(
                task_id=self.done.id, tenant_id=queue.tenant.tid, command=queue.command,
                url=f"https://{word}.example.com/hook",
            )  # fmt: skip

    @property
    def named(self) -> dict[str, str]:
        return {"tenant": self.queue.tenant.tid, "command": self.queue.command}

    def of(self, task_id: str) -> dict[str, str]:
        return {"tenant": self.queue.tenant.tid, "id": task_id}


# What each page is asked with. A path that is in neither table fails a test.
PAGES: dict[str, Callable[[World], dict[str, str]]] = {
    "overview": lambda w: {"tenant": w.queue.tenant.slug},
    "overview-data": lambda w: {"pulses": "1", "tenant": w.queue.tenant.slug},
    "queue": lambda w: w.named,
    "queue-data": lambda w: w.named,
    "queue-course": lambda w: {**w.named, "span": "1h"},
    "tasks": lambda w: {"tenant": w.queue.tenant.tid, "q": w.word},
    "task": lambda w: w.of(w.dead[0]),
    "task-artifact": lambda w: {**w.of(w.done.id), "artifact": w.artifact},
    "dead": lambda w: w.named,
    "dead-list": lambda w: {**w.named, "text": "payload", "deliveriesFrom": "1"},
    "dead-export": lambda w: {**w.named, "format": "csv"},
    "bulk": lambda w: {},
    "bulk-new": lambda w: w.named,
    "bulk-job": lambda w: {"id": str(w.job.pk)},
    "bulk-job-data": lambda w: {"id": str(w.job.pk)},
}
ACTS: dict[str, Callable[[World], dict[str, Any]]] = {
    "queue-pause": lambda w: w.named,
    "queue-resume": lambda w: w.named,
    "queue-policy": lambda w: {**w.named, "maxConsumers": "7"},
    "queue-policy-delete": lambda w: w.named,
    "task-cancel": lambda w: w.of(w.waiting.id),
    "task-replay": lambda w: w.of(w.dead[0]),
    "task-delete": lambda w: w.of(w.dead[0]),
    "dead-replay": lambda w: {"ids": [f"{w.queue.tenant.tid}:{task_id}" for task_id in w.dead]},
    "dead-delete": lambda w: {"ids": [f"{w.queue.tenant.tid}:{task_id}" for task_id in w.dead]},
    "bulk-start": lambda w: {**w.named, "kind": "delete"},
    "bulk-cancel": lambda w: w.of(str(w.job.pk)),
    "bulk-recall": lambda w: w.of(str(w.replayed.pk)),
}
# What other pages need is not asked of those who may only look.
OPERATORS = {"bulk-new"}
ADMINS = {"queue-policy", "queue-policy-delete"}
ROLES = ["viewer", "operator", "admin"]


@pytest.fixture
def mine(acme: Queue) -> World:
    return World(acme, "mine")


@pytest.fixture
def foreign(zeta: Queue) -> World:
    return World(zeta, CANARY)


def url(name: str) -> str:
    return reverse(f"console:{name}")


def text_of(answer: Any) -> str:
    return (answer.getvalue() if answer.streaming else answer.content).decode()


def state(world: World) -> Any:
    """All that an act could change."""
    seen = [_live(world, each) for each in [*world.dead, world.held.id, world.waiting.id]]
    jobs = list(BulkJob.objects.order_by("pk").values("pk", "state"))
    dead = AuditedResult.objects.filter(is_dead=True).count()
    rules = list(QueuePolicy.objects.filter(tenant_id=world.queue.tenant.tid).values())
    return seen, selectors.queue_stats(world.queue.tenant, world.queue.command).run_sync(), rules, jobs, dead


def _live(world: World, task_id: str) -> Task | None:
    try:
        return selectors.task(world.queue.tenant, task_id).run_sync()
    except errors.TaskNotFound:
        return None


def test_every_path_is_in_a_table() -> None:
    assert {pattern.name for pattern in urls.urlpatterns} == PAGES.keys() | ACTS.keys()


# -- whose data -----------------------------------------------------------------------------------------------------


@ISOLATED
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_it_is_about(name: str, mine: World, login: Login) -> None:
    """Without this, a page that shows nothing would pass the tests below."""
    answer = login("operator").get(url(name), PAGES[name](mine))
    assert answer.status_code == 200
    shown = {
        "queue-course": '"completed"',
        "bulk-job-data": '"running"',
        "task-artifact": "mine-artifact",
        "tasks": "mine-error",
    }
    assert shown.get(name, "mine" if name not in {"overview", "overview-data"} else "render") in text_of(answer)


@ISOLATED
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("role", [None, *ROLES])
def test_no_page_shows_another_tenants_data(
    role: str | None, name: str, mine: World, foreign: World, login: Login
) -> None:
    client = login(role)
    asked = PAGES[name](foreign)
    without_tenant = {key: value for key, value in asked.items() if key != "tenant"}
    mixed = {**asked, "tenant": mine.queue.tenant.tid}
    for query in (asked, without_tenant, mixed, {}):
        answer = client.get(url(name), query)
        assert answer.status_code in {200, 302, 403, 404}
        shown = text_of(answer)
        # A page repeats what it was asked, in its filters and links; that is no news to who asked.
        for said in asked.values():
            shown = shown.replace(f'value="{said}"', "").replace(quote_plus(said), "").replace(f"command {said}", "")
        assert CANARY not in shown, (query, shown[shown.index(CANARY) - 200 :][:400])


@ISOLATED
@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("role", [None, *ROLES])
def test_no_act_reaches_another_tenants_work(
    role: str | None, name: str, mine: World, foreign: World, login: Login
) -> None:
    client = login(role)
    before = state(foreign)
    asked = ACTS[name](foreign)
    own = {**asked, "tenant": mine.queue.tenant.tid, "reason": "because"}
    if "ids" in asked:
        own["ids"] = [f"{mine.queue.tenant.tid}:{task_id}" for task_id in foreign.dead]
    assert client.post(url(name), {**asked, "reason": "because"}).status_code == 404
    client.post(url(name), own)
    after = state(foreign)
    jobs = [job for job in after[3] if job in before[3]]
    assert (*after[:3], jobs, after[4]) == before


@ISOLATED
def test_one_foreign_among_the_selected_and_nothing_is_done(mine: World, foreign: World, login: Login) -> None:
    before = state(mine)
    ids = ACTS["dead-delete"](mine)["ids"] + ACTS["dead-delete"](foreign)["ids"][:1]
    assert login("operator").post(url("dead-delete"), {"ids": ids, "reason": "because"}).status_code == 404
    assert state(mine) == before


@ISOLATED
@pytest.mark.parametrize("role", [None, *ROLES])
def test_an_id_of_another_tenant_is_not_found(role: str | None, mine: World, foreign: World, login: Login) -> None:
    client = login(role)
    for task_id in (foreign.dead[0], foreign.held.id, foreign.done.id):
        answer = client.get(url("tasks"), {"q": task_id})
        assert answer.status_code == 200
        assert foreign.queue.tenant.tid not in text_of(answer)


@ISOLATED
def test_root_sees_all_tenants(mine: World, foreign: World, login: Login) -> None:
    client = login("root")
    assert {row["tenant"] for row in client.get(url("overview-data")).json()["rows"]} == {"acme", "kanarie-zeta"}
    assert "kanarie-error" in text_of(client.get(url("dead-export")))


# -- who may act ----------------------------------------------------------------------------------------------------


@RIGHTS
@pytest.mark.parametrize("name", ACTS)
def test_a_viewer_cannot_act(name: str, mine: World, login: Login) -> None:
    before = state(mine)
    answer = login("viewer").post(url(name), {**ACTS[name](mine), "reason": "because"})
    assert answer.status_code == 403
    assert state(mine) == before
    assert not LogEntry.objects.exists()


@RIGHTS
@pytest.mark.parametrize(
    "name", sorted(PAGES.keys() - {"overview-data", "queue-data", "queue-course", "bulk-job-data"})
)
def test_a_viewer_is_offered_nothing_to_do(name: str, mine: World, login: Login) -> None:
    answer = login("viewer").get(url(name), PAGES[name](mine))
    assert answer.status_code == (403 if name in OPERATORS else 200)
    assert 'method="post" action="/admin/console/' not in text_of(answer)


@RIGHTS
@pytest.mark.parametrize("name", ACTS)
def test_an_act_needs_its_token_its_reason_and_a_post(name: str, mine: World, login: Login) -> None:
    before = state(mine)
    asked = ACTS[name](mine)
    guarded = login("admin", enforce_csrf_checks=True)
    assert guarded.post(url(name), {**asked, "reason": "because"}).status_code == 403
    client = Client()
    client.force_login(User.objects.get(username="staff-admin"))
    assert client.get(url(name), {**asked, "reason": "because"}).status_code == 405
    for reason in ({}, {"reason": "  "}):
        answer = client.post(url(name), {**asked, **reason}, follow=True)
        assert "say why" in text_of(answer)
    assert state(mine) == before
    assert not LogEntry.objects.exists()


@RIGHTS
@pytest.mark.parametrize("name", ACTS)
def test_an_operators_act_is_done_and_on_record(name: str, mine: World, login: Login) -> None:
    before = state(mine)
    role = "admin" if name in ADMINS else "operator"
    answer = login(role).post(url(name), {**ACTS[name](mine), "reason": "the disk is back"}, follow=True)
    assert answer.status_code == 200
    if name != "queue-resume":  # nothing was paused
        assert state(mine) != before
    entry = LogEntry.objects.get()
    assert entry.object_id == mine.queue.tenant.tid
    assert entry.user.username == f"staff-{role}"
    assert entry.get_change_message().endswith(": the disk is back")


@RIGHTS
@pytest.mark.parametrize("path", ["console/overview.json", "console/task/", "console/dead/", "console/queue/"])
def test_strangers_are_sent_to_the_login(path: str, mine: World) -> None:
    answer = Client().get(f"/admin/{path}")
    assert (answer.status_code, answer["Location"].partition("?")[0]) == (302, "/admin/login/")


@RIGHTS
def test_the_way_back_stays_on_this_site(mine: World, login: Login) -> None:
    asked = {**ACTS["queue-pause"](mine), "reason": "x", "next": "https://elsewhere.example.com/"}
    assert login("operator").post(url("queue-pause"), asked)["Location"] == "/admin/"


# -- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("role", ["viewer", "root"])
@pytest.mark.spec("ADM-3", "No page asks the database more than 20 questions; each page's number is checked in")
def test_a_page_asks_the_database_so_often(role: str, name: str, mine: World, foreign: World, login: Login) -> None:
    if role == "viewer" and name in OPERATORS:
        role = "operator"
    client = login(role)
    client.get(url("overview"))  # content types and the like are known from the second request on
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert text_of(client.get(url(name), PAGES[name](mine)))
    asked = [query["sql"] for query in queries.captured_queries if not _is_frame(query["sql"])]
    assert len(asked) <= MOST, asked
    known: dict[str, int] = json.loads(COUNTS.read_text())
    if os.environ.get("CODEQ_TEST_WRITE_COUNTS"):  # after a change that is meant
        known[f"{name} as {role}"] = len(asked)
        COUNTS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    assert known.get(f"{name} as {role}") == len(asked), asked


def _is_frame(sql: str) -> bool:
    """Of a transaction, a time limit in it, or the session; what pages read is counted."""
    return sql.startswith(("SAVEPOINT", "RELEASE", "SELECT current_setting", "SELECT set_config"))
