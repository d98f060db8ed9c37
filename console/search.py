"""One box for a task's id, an idempotency key, a worker, or words: of one tenant, or of all that a person sees."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from console import deadletters
from console.page import Page, tenant_of
from console.task import TONES
from core import errors
from core.admin.links import task_url
from queues import selectors
from queues.domain import Status, Task
from queues.models import AuditedResult
from queues.search import platform_search, tenant_search
from queues.search.tenant_search import TaskQuery
from tenants import scoping
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot

CHARS = 500
PAGE = 50
# Without a word to look for, each tenant's queues are walked for itself: of more than these, one has to be chosen.
TENANTS = 10


class Found(NamedTuple):
    tid: str
    slug: str
    task: Task

    @property
    def url(self) -> str:
        return task_url(self.tid, self.task.id)

    @property
    def tone(self) -> str:
        return TONES.get(self.task.status, "")


class Answer(NamedTuple):
    found: Sequence[Found] = ()
    cursor: str | None = None
    looked_into: str = ""


class SearchPage(Page):
    title = "Tasks"
    template_name = "console/search.html"

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        q = request.GET.get("q", "").strip()[:CHARS]
        tid = owner(request, q) if q else None
        if tid is not None:
            return redirect(task_url(tid, q.lower()))
        return super().get(request, *args, **kwargs)

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        request = self.request
        query = {name: request.GET.get(name, "").strip()[:CHARS] for name in ("q", "tenant", "command", "status")}
        mine = scoping.tenants_of(request.user).order_by("slug").values_list("tid", "slug")
        slugs = dict(mine[: platform_search.MAX_TENANTS + 1])
        tenant = tenant_of(request, query["tenant"]) if query["tenant"] else None
        answer, problem = Answer(), ""
        if any(query.values()):
            try:
                answer = _search(request, tenant, query, slugs, request.GET.get("cursor") or None)
            except errors.InvalidRequest as error:
                problem = str(error)
        more = urlencode({**query, "cursor": answer.cursor}) if answer.cursor else ""
        return super().get_context_data(
            query=query,
            is_asked=any(query.values()),
            tenants=list(slugs.items()) if len(slugs) <= deadletters.TENANTS else [],
            tenant=tenant,
            statuses=list(Status),
            found=answer.found,
            looked_into=answer.looked_into,
            problem=problem,
            next_url=f"{reverse('console:tasks')}?{more}" if more else "",
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
    tid = audited or selectors.owner(task_id).run_sync()
    return tid if tid and scoping.has_role(request.user, tid) else None


def _search(
    request: HttpRequest,
    tenant: TenantSnapshot | None,
    query: dict[str, str],
    slugs: dict[str, str],
    cursor: str | None,
) -> Answer:
    """A page of one tenant's tasks; or of all tenants' where there is a word to look for; or the first of each."""
    asked = _asked(query)
    if tenant or len(slugs) == 1:
        return _of_one(tenant or tenant_of(request, next(iter(slugs))), asked, cursor)
    if asked.q is not None:
        return _of_all(scoping.tids_of(request.user), slugs, asked, cursor)
    tenants = [tenant for tid in islice(slugs, TENANTS) if (tenant := tenant_cache.find_by_tid(tid))]
    return Answer(
        found=[
            Found(tenant.tid, tenant.slug, task)
            for tenant in tenants
            for task in tenant_search.page(tenant, asked, limit=PAGE // TENANTS).tasks
        ],
        looked_into=f"The first {PAGE // TENANTS} of each of {_tenants(len(tenants), of=len(slugs))}: "
        "choose a tenant for all of its tasks.",
    )


def _of_one(tenant: TenantSnapshot, asked: TaskQuery, cursor: str | None) -> Answer:
    page = tenant_search.page(tenant, asked, cursor=cursor, limit=PAGE)
    return Answer(found=[Found(tenant.tid, tenant.slug, task) for task in page.tasks], cursor=page.cursor)


def _of_all(tids: list[str] | None, slugs: dict[str, str], asked: TaskQuery, cursor: str | None) -> Answer:
    page = platform_search.page(tids, list(slugs), asked, cursor=cursor, limit=PAGE)
    # An ended task may be of a tenant beyond those, or of one that has gone.
    others = deadletters.slugs_of({each.tid for each in page.results} - slugs.keys())
    looked = f"Looked among the live tasks of {_tenants(len(slugs), of=len(slugs))} for this key and this worker"
    looked += ", but not at all of them: choose a tenant to see the rest" if page.is_cut else ""
    return Answer(
        found=[Found(tid, slugs.get(tid) or others.get(tid, tid), task) for tid, task in page.results],
        cursor=page.cursor,
        looked_into=f"{looked}; and among all that have ended for these words.",
    )


def _tenants(count: int, *, of: int) -> str:
    if of > platform_search.MAX_TENANTS:
        return f"the first {min(count, platform_search.MAX_TENANTS):,} of your tenants"
    return f"your {count:,} tenants" if count == of else f"the first {count:,} of your {of:,} tenants"


def _asked(query: dict[str, str]) -> TaskQuery:
    status = query["status"]
    if status and status not in set(Status):
        raise errors.InvalidRequest("status: not one that a task has")
    return TaskQuery(q=query["q"] or None, command=query["command"] or None, status=Status(status) if status else None)
