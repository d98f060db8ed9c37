"""Every URL of the console: isolation of tenants, permissions, number of database queries."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
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
from tests.console.query_counts import assert_query_count
from tests.console.work import Login, create_dead_letters, drain_events
from tests.factories import BulkJobFactory, DeliveryFactory
from tests.fixtures.queues import Queue
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db
ISOLATED = pytest.mark.spec("ADM-4", "Staff of a tenant cannot see another tenant's data on any page, count or export")
RIGHTS = pytest.mark.spec("ADM-4", "A viewer cannot act; an operator's action needs a reason and is recorded")
CANARY = "kanarie"


class QueueWithEveryState:
    """A queue with tasks in every state, and the parameters of pages and actions about it."""

    def __init__(self, queue: Queue, word: str) -> None:
        payload, error = json.dumps({"secret": f"{word}-payload"}), f"{word}-error 7"
        self.queue, self.word = queue, word
        self.dead = create_dead_letters(queue, 3, payload, error)
        self.done = queue.enqueue(payload, webhook=f"https://{word}.example.com/hook")
        queue.claim(f"{word}-worker")
        new = [artifacts.NewArtifact(name=f"{word}.txt", content=f"{word}-artifact".encode())]
        stored, _ = artifacts.store(queue.tenant.tid, self.done.id, new)
        self.artifact = stored[0].url.rpartition("/")[2]
        result = json.dumps({"text": f"{word}-result"}).encode()
        queue.complete(self.done, f"{word}-worker", result, artifacts=msgspec.json.encode(stored))
        self.held = queue.enqueue(payload, priority=9)
        queue.claim(f"{word}-worker")
        self.waiting = queue.enqueue(payload)
        queue.enqueue(payload, delay_ms=3_600_000)
        drain_events()
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
    def queue_parameters(self) -> dict[str, str]:
        return {"tenant": self.queue.tenant.tid, "command": self.queue.command}

    def id_parameters(self, task_id: str) -> dict[str, str]:
        return {"tenant": self.queue.tenant.tid, "id": task_id}


# The parameters of each page and action. A URL without an entry fails a test.
PAGES: dict[str, Callable[[QueueWithEveryState], dict[str, str]]] = {
    "overview": lambda q: {"tenant": q.queue.tenant.slug},
    "overview-data": lambda q: {"rates": "1", "tenant": q.queue.tenant.slug},
    "queue": lambda q: q.queue_parameters,
    "queue-data": lambda q: q.queue_parameters,
    "queue-charts": lambda q: {**q.queue_parameters, "span": "1h"},
    "tasks": lambda q: {"tenant": q.queue.tenant.tid, "q": q.word},
    "task": lambda q: q.id_parameters(q.dead[0]),
    "task-artifact": lambda q: {**q.id_parameters(q.done.id), "artifact": q.artifact},
    "dead": lambda q: q.queue_parameters,
    "dead-list": lambda q: {**q.queue_parameters, "text": "payload", "deliveriesFrom": "1"},
    "dead-export": lambda q: {**q.queue_parameters, "format": "csv"},
    "bulk": lambda q: {},
    "bulk-new": lambda q: q.queue_parameters,
    "bulk-job": lambda q: {"id": str(q.job.pk)},
    "bulk-job-data": lambda q: {"id": str(q.job.pk)},
}
ACTIONS: dict[str, Callable[[QueueWithEveryState], dict[str, Any]]] = {
    "queue-pause": lambda q: q.queue_parameters,
    "queue-resume": lambda q: q.queue_parameters,
    "queue-policy": lambda q: {**q.queue_parameters, "maxConsumers": "7"},
    "queue-policy-delete": lambda q: q.queue_parameters,
    "task-cancel": lambda q: q.id_parameters(q.waiting.id),
    "task-replay": lambda q: q.id_parameters(q.dead[0]),
    "task-delete": lambda q: q.id_parameters(q.dead[0]),
    "dead-replay": lambda q: {"ids": [f"{q.queue.tenant.tid}:{task_id}" for task_id in q.dead]},
    "dead-delete": lambda q: {"ids": [f"{q.queue.tenant.tid}:{task_id}" for task_id in q.dead]},
    "bulk-start": lambda q: {**q.queue_parameters, "kind": "delete"},
    "bulk-cancel": lambda q: q.id_parameters(str(q.job.pk)),
    "bulk-recall": lambda q: q.id_parameters(str(q.replayed.pk)),
}
# The pages and actions that need more than the role of a viewer or operator.
OPERATORS = {"bulk-new"}
ADMINS = {"queue-policy", "queue-policy-delete"}
ROLES = ["viewer", "operator", "admin"]


@pytest.fixture
def mine(acme: Queue) -> QueueWithEveryState:
    return QueueWithEveryState(acme, "mine")


@pytest.fixture
def foreign(zeta: Queue) -> QueueWithEveryState:
    return QueueWithEveryState(zeta, CANARY)


def url(name: str) -> str:
    return reverse(f"console:{name}")


def text_of(response: Any) -> str:
    return (response.getvalue() if response.streaming else response.content).decode()


def state(target_queue: QueueWithEveryState) -> Any:
    """Read everything that an action could change."""
    tasks = [
        _find_live_task(target_queue, task_id)
        for task_id in [*target_queue.dead, target_queue.held.id, target_queue.waiting.id]
    ]
    jobs = list(BulkJob.objects.order_by("pk").values("pk", "state"))
    dead = AuditedResult.objects.filter(is_dead=True).count()
    policy_rows = list(QueuePolicy.objects.filter(tenant_id=target_queue.queue.tenant.tid).values())
    return (
        tasks,
        selectors.queue_stats(target_queue.queue.tenant, target_queue.queue.command).run_sync(),
        policy_rows,
        jobs,
        dead,
    )


def _find_live_task(target_queue: QueueWithEveryState, task_id: str) -> Task | None:
    try:
        return selectors.task(target_queue.queue.tenant, task_id).run_sync()
    except errors.TaskNotFound:
        return None


def test_every_url_is_in_a_table() -> None:
    assert {pattern.name for pattern in urls.urlpatterns} == PAGES.keys() | ACTIONS.keys()


# --- isolation ---


@ISOLATED
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_own_tenants_data(name: str, mine: QueueWithEveryState, login: Login) -> None:
    """Guard the tests below, which would pass if the pages were empty."""
    response = login("operator").get(url(name), PAGES[name](mine))
    assert response.status_code == 200
    expected = {
        "queue-charts": '"completed"',
        "bulk-job-data": '"running"',
        "task-artifact": "mine-artifact",
        "tasks": "mine-error",
    }
    assert expected.get(name, "mine" if name not in {"overview", "overview-data"} else "render") in text_of(response)


@ISOLATED
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("role", [None, *ROLES])
def test_no_page_shows_another_tenants_data(
    role: str | None, name: str, mine: QueueWithEveryState, foreign: QueueWithEveryState, login: Login
) -> None:
    client = login(role)
    parameters = PAGES[name](foreign)
    without_tenant = {key: value for key, value in parameters.items() if key != "tenant"}
    mixed = {**parameters, "tenant": mine.queue.tenant.tid}
    for query in (parameters, without_tenant, mixed, {}):
        response = client.get(url(name), query)
        assert response.status_code in {200, 302, 403, 404}
        text = text_of(response)
        # A page repeats its parameters in filters and links. The client already has them.
        for value in parameters.values():
            text = text.replace(f'value="{value}"', "").replace(quote_plus(value), "").replace(f"command {value}", "")
        assert CANARY not in text, (query, text[text.index(CANARY) - 200 :][:400])


@ISOLATED
@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("role", [None, *ROLES])
def test_no_action_changes_another_tenants_work(
    role: str | None, name: str, mine: QueueWithEveryState, foreign: QueueWithEveryState, login: Login
) -> None:
    client = login(role)
    before = state(foreign)
    parameters = ACTIONS[name](foreign)
    mixed = {**parameters, "tenant": mine.queue.tenant.tid, "reason": "because"}
    if "ids" in parameters:
        mixed["ids"] = [f"{mine.queue.tenant.tid}:{task_id}" for task_id in foreign.dead]
    assert client.post(url(name), {**parameters, "reason": "because"}).status_code == 404
    client.post(url(name), mixed)
    after = state(foreign)
    jobs = [job for job in after[3] if job in before[3]]
    assert (*after[:3], jobs, after[4]) == before


@ISOLATED
def test_nothing_is_deleted_if_one_selected_task_is_foreign(
    mine: QueueWithEveryState, foreign: QueueWithEveryState, login: Login
) -> None:
    before = state(mine)
    ids = ACTIONS["dead-delete"](mine)["ids"] + ACTIONS["dead-delete"](foreign)["ids"][:1]
    assert login("operator").post(url("dead-delete"), {"ids": ids, "reason": "because"}).status_code == 404
    assert state(mine) == before


@ISOLATED
@pytest.mark.parametrize("role", [None, *ROLES])
def test_an_id_of_another_tenant_is_not_found(
    role: str | None, mine: QueueWithEveryState, foreign: QueueWithEveryState, login: Login
) -> None:
    client = login(role)
    for task_id in (foreign.dead[0], foreign.held.id, foreign.done.id):
        response = client.get(url("tasks"), {"q": task_id})
        assert response.status_code == 200
        assert foreign.queue.tenant.tid not in text_of(response)


@ISOLATED
def test_a_superuser_sees_all_tenants(mine: QueueWithEveryState, foreign: QueueWithEveryState, login: Login) -> None:
    client = login("root")
    assert {row["tenant"] for row in client.get(url("overview-data")).json()["queues"]} == {"acme", "kanarie-zeta"}
    assert "kanarie-error" in text_of(client.get(url("dead-export")))


# --- permissions ---


@RIGHTS
@pytest.mark.parametrize("name", ACTIONS)
def test_a_viewer_cannot_act(name: str, mine: QueueWithEveryState, login: Login) -> None:
    before = state(mine)
    response = login("viewer").post(url(name), {**ACTIONS[name](mine), "reason": "because"})
    assert response.status_code == 403
    assert state(mine) == before
    assert not LogEntry.objects.exists()


@RIGHTS
@pytest.mark.parametrize(
    "name", sorted(PAGES.keys() - {"overview-data", "queue-data", "queue-charts", "bulk-job-data"})
)
def test_a_viewers_pages_have_no_actions(name: str, mine: QueueWithEveryState, login: Login) -> None:
    response = login("viewer").get(url(name), PAGES[name](mine))
    assert response.status_code == (403 if name in OPERATORS else 200)
    assert 'method="post" action="/admin/console/' not in text_of(response)


@RIGHTS
@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_needs_a_csrf_token_a_reason_and_a_post(name: str, mine: QueueWithEveryState, login: Login) -> None:
    before = state(mine)
    parameters = ACTIONS[name](mine)
    client_without_token = login("admin", enforce_csrf_checks=True)
    assert client_without_token.post(url(name), {**parameters, "reason": "because"}).status_code == 403
    client = Client()
    client.force_login(User.objects.get(username="staff-admin"))
    assert client.get(url(name), {**parameters, "reason": "because"}).status_code == 405
    for reason in ({}, {"reason": "  "}):
        response = client.post(url(name), {**parameters, **reason}, follow=True)
        assert "Nothing was changed. Enter a reason" in text_of(response)
    assert state(mine) == before
    assert not LogEntry.objects.exists()


@RIGHTS
@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_takes_effect_and_is_recorded(name: str, mine: QueueWithEveryState, login: Login) -> None:
    before = state(mine)
    role = "admin" if name in ADMINS else "operator"
    response = login(role).post(url(name), {**ACTIONS[name](mine), "reason": "the disk is back"}, follow=True)
    assert response.status_code == 200
    if name != "queue-resume":  # nothing was paused
        assert state(mine) != before
    entry = LogEntry.objects.get()
    assert entry.object_id == mine.queue.tenant.tid
    assert entry.user.username == f"staff-{role}"
    assert entry.get_change_message().endswith(": the disk is back")


@RIGHTS
@pytest.mark.parametrize("path", ["console/overview.json", "console/task/", "console/dead/", "console/queue/"])
def test_pages_require_a_login(path: str, mine: QueueWithEveryState) -> None:
    response = Client().get(f"/admin/{path}")
    assert (response.status_code, response["Location"].partition("?")[0]) == (302, "/admin/login/")


@RIGHTS
def test_the_redirect_stays_on_this_site(mine: QueueWithEveryState, login: Login) -> None:
    form = {**ACTIONS["queue-pause"](mine), "reason": "x", "next": "https://elsewhere.example.com/"}
    assert login("operator").post(url("queue-pause"), form)["Location"] == "/admin/"


# --- query counts ---


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("role", ["viewer", "root"])
@pytest.mark.spec("ADM-3", "No page needs more than 20 database queries; the number of each page is recorded")
def test_the_number_of_queries_of_a_page(
    role: str, name: str, mine: QueueWithEveryState, foreign: QueueWithEveryState, login: Login
) -> None:
    if role == "viewer" and name in OPERATORS:
        role = "operator"
    client = login(role)
    client.get(url("overview"))  # the first request fills caches, for example of content types
    with CaptureQueriesContext(connection) as queries:
        assert text_of(client.get(url(name), PAGES[name](mine)))
    assert_query_count(f"{name} as {role}", queries)
