"""All routes of the API: who may call each of them, and an example call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

from core.http.api_view import ApiView
from tests.queues.api.asgi_client import Client
from tests.queues.api.tasks import COMPLETED

ABSENT = "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"
NEW_TASK = {"command": "RENDER", "payload": {}}


@dataclass(frozen=True)
class RouteCase:
    """The role that may call an operation, and the arguments of an example call."""

    role: str  # producer, worker, either, admin, public
    body: Any = None
    scopes: tuple[str, ...] = ()
    # The status for an id of another tenant: of a task, subscription or bulk job. None: the route takes no id.
    foreign: int | None = None
    # The status for a worker that does not hold the lease.
    other_worker: int | None = None
    query: str = field(default="")


ROUTE_CASES: dict[tuple[str, str], RouteCase] = {
    ("GET", "/healthz"): RouteCase("public"),
    ("GET", "/readyz"): RouteCase("public"),
    ("GET", "/metrics"): RouteCase("public"),
    ("GET", "/.well-known/jwks.json"): RouteCase("public"),
    ("POST", "/v1/codeq/tasks"): RouteCase("producer", NEW_TASK),
    ("POST", "/v1/codeq/tasks/batch"): RouteCase("producer", {"tasks": [NEW_TASK]}),
    ("GET", "/v1/codeq/tasks/<str:task_id>"): RouteCase("either", foreign=404),
    ("DELETE", "/v1/codeq/tasks/<str:task_id>"): RouteCase("producer", foreign=404),
    ("GET", "/v1/codeq/tasks/<str:task_id>/result"): RouteCase("either", foreign=404),
    ("GET", "/v1/codeq/tasks/<str:task_id>/artifacts/<str:artifact_id>"): RouteCase("either", foreign=404),
    ("POST", "/v1/codeq/tasks/<str:task_id>/result"): RouteCase(
        "worker", COMPLETED, scopes=("codeq:result",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/<str:task_id>/heartbeat"): RouteCase(
        "worker", {}, scopes=("codeq:heartbeat",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/<str:task_id>/nack"): RouteCase(
        "worker", {}, scopes=("codeq:nack",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/<str:task_id>/abandon"): RouteCase(
        "worker", {}, scopes=("codeq:abandon",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/claim"): RouteCase("worker", {}, scopes=("codeq:claim",)),
    ("POST", "/v1/codeq/tasks/claim/batch"): RouteCase("worker", {}, scopes=("codeq:claim",)),
    ("POST", "/v1/codeq/tasks/batch/results"): RouteCase(
        "worker", {"results": [{"taskId": "TASK"} | COMPLETED]}, scopes=("codeq:result",), foreign=200, other_worker=200
    ),
    ("POST", "/v1/codeq/tasks/exchange"): RouteCase(
        "worker",
        {"results": [{"taskId": "TASK"} | COMPLETED]},
        scopes=("codeq:result", "codeq:claim"),
        foreign=200,
        other_worker=200,
    ),
    ("POST", "/v1/codeq/workers/subscriptions"): RouteCase(
        "worker", {"callbackUrl": "https://worker.example.com/wake"}, scopes=("codeq:subscribe",)
    ),
    ("GET", "/v1/codeq/workers/subscriptions"): RouteCase("worker", scopes=("codeq:subscribe",)),
    ("DELETE", "/v1/codeq/workers/subscriptions/<str:subscription_id>"): RouteCase(
        "worker", scopes=("codeq:subscribe",), foreign=404
    ),
    ("POST", "/v1/codeq/workers/subscriptions/<str:subscription_id>/heartbeat"): RouteCase(
        "worker", {}, scopes=("codeq:subscribe",), foreign=404
    ),
    ("GET", "/v1/codeq/tasks"): RouteCase("producer"),
    ("GET", "/v1/codeq/admin/dlq/<str:command>"): RouteCase("admin"),
    ("POST", "/v1/codeq/admin/dlq/<str:command>/replay"): RouteCase("admin", {"dryRun": True}),
    ("GET", "/v1/codeq/admin/bulk/<str:job_id>"): RouteCase("admin", foreign=404),
    ("DELETE", "/v1/codeq/admin/bulk/<str:job_id>"): RouteCase("admin", foreign=404),
    ("GET", "/v1/codeq/admin/topics"): RouteCase("admin"),
    ("GET", "/v1/codeq/admin/topics/<str:name>"): RouteCase("admin"),
    ("PUT", "/v1/codeq/admin/topics/<str:name>"): RouteCase("admin", {"maxAttempts": 3}),
    ("DELETE", "/v1/codeq/admin/topics/<str:name>"): RouteCase("admin", query="?deletionPolicy=Delete"),
    ("GET", "/v1/codeq/admin/queues"): RouteCase("admin"),
    ("GET", "/v1/codeq/admin/queues/<str:command>"): RouteCase("admin"),
    ("POST", "/v1/codeq/admin/queues/<str:command>/pause"): RouteCase("admin", {}),
    ("POST", "/v1/codeq/admin/queues/<str:command>/resume"): RouteCase("admin", {}),
    ("POST", "/v1/codeq/admin/tasks/cleanup"): RouteCase("admin", {}),
    ("GET", "/v1/codeq/insights/<str:mart>"): RouteCase("producer"),
}


PROTECTED = {route: case for route, case in ROUTE_CASES.items() if case.role != "public"}


def list_routes(patterns: list[Any] | None = None, prefix: str = "/") -> list[tuple[str, str]]:
    """Return every method of every path that an ApiView serves."""
    routes = []
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        path = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            routes += list_routes(pattern.url_patterns, path)
        elif isinstance(pattern, URLPattern):
            view = getattr(pattern.callback, "cls", None)
            if isinstance(view, type) and issubclass(view, ApiView):
                routes += [(method, path) for method in view.operations if method != "HEAD"]
    return routes


def fill_in_id(value: Any, task_id: str) -> Any:
    """Replace each "TASK" in a body."""
    if isinstance(value, dict):
        return {name: fill_in_id(item, task_id) for name, item in value.items()}
    if isinstance(value, list):
        return [fill_in_id(item, task_id) for item in value]
    return task_id if value == "TASK" else value


async def call_route(client: Client, route: tuple[str, str], case: RouteCase, task_id: str = ABSENT) -> Any:
    """Call the route, with this id in its path and body."""
    method, path = route
    target = (
        path.replace("<str:task_id>", task_id)
        .replace("<str:subscription_id>", task_id)
        .replace("<str:job_id>", task_id)
        .replace("<str:name>", "OF_THE_ISOLATION_TESTS")
        .replace("<str:command>", "RENDER")
        .replace("<str:mart>", "latency")
    )
    target = target.replace("<str:artifact_id>", "0" * 64)
    body = {} if case.body is None else {"body": fill_in_id(case.body, task_id)}
    return await client.request(method, target + case.query, headers={"X-Request-Id": "same"}, **body)
