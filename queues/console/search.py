"""One box for a task's id, an idempotency key, a worker, or words: of one tenant, or of those a person sees."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from codeq_site import errors
from queues import search, selectors
from queues.console.page import Page, tenant_of
from queues.console.task import TONES, url_of_task
from queues.models import AuditedResult
from queues.search import Asked
from queues.task import Status, Task
from tenants import scoping
from tenants.directory import directory
from tenants.tenant import Tenant

CHARS = 500
PAGE = 50
# Each tenant's queues are walked for itself: of more than these, one has to be chosen.
TENANTS = 10
OFFERED = 200


class Found(NamedTuple):
    tenant: Tenant
    task: Task

    @property
    def url(self) -> str:
        return url_of_task(self.tenant.tid, self.task.id)

    @property
    def tone(self) -> str:
        return TONES.get(self.task.status, "")


class SearchPage(Page):
    title = "Tasks"
    template_name = "console/search.html"

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        q = request.GET.get("q", "").strip()[:CHARS]
        tid = owner(request, q) if q else None
        if tid is not None:
            return redirect(url_of_task(tid, q.lower()))
        return super().get(request, *args, **kwargs)

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        request = self.request
        query = {name: request.GET.get(name, "").strip()[:CHARS] for name in ("q", "tenant", "command", "status")}
        offered = list(scoping.tenants_of(request.user).order_by("slug").values_list("tid", "slug")[:OFFERED])
        found: list[Found] = []
        cursor, problem, is_cut = None, "", False
        if any(query.values()):
            try:
                tenants = _tenants(request, query["tenant"], [tid for tid, _ in offered])
                is_cut = len(tenants) > TENANTS
                found, cursor = _search(tenants[:TENANTS], _asked(query), request.GET.get("cursor"))
            except errors.InvalidRequest as error:
                problem = str(error)
        return super().get_context_data(
            query=query,
            is_asked=any(query.values()),
            tenants=offered,
            statuses=list(Status),
            found=found,
            problem=problem,
            is_cut=is_cut,
            most=TENANTS,
            next_url=f"{reverse('console:tasks')}?{urlencode({**query, 'cursor': cursor})}" if cursor else "",
            **extra,
        )


def owner(request: HttpRequest, q: str) -> str | None:
    """The tenant of the task with this id, if it is an id, and if the person may know of it."""
    try:
        task_id = str(uuid.UUID(q))
    except ValueError:
        return None
    if task_id != q.lower():
        return None
    audited = AuditedResult.objects.filter(pk=task_id).values_list("tenant_id", flat=True).first()
    tid = audited or selectors.owner(task_id).now()
    return tid if tid and scoping.may(request.user, tid) else None


def _tenants(request: HttpRequest, tid: str, offered: Iterable[str]) -> list[Tenant]:
    if tid:
        return [tenant_of(request, tid)]
    return [tenant for each in offered if (tenant := directory.find_tid(each))]


def _search(tenants: list[Tenant], asked: Asked, cursor: str | None) -> tuple[list[Found], str | None]:
    """A page of one tenant's tasks, or the first of each of several."""
    if len(tenants) == 1:
        page = search.page(tenants[0], asked, cursor=cursor or None, limit=PAGE)
        return [Found(tenants[0], task) for task in page.tasks], page.cursor
    limit = PAGE // max(len(tenants), 1)
    found = [Found(tenant, task) for tenant in tenants for task in search.page(tenant, asked, limit=limit).tasks]
    return found, None


def _asked(query: dict[str, str]) -> Asked:
    status = query["status"]
    if status and status not in set(Status):
        raise errors.InvalidRequest("status: not one that a task has")
    return Asked(q=query["q"] or None, command=query["command"] or None, status=Status(status) if status else None)
