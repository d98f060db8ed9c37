"""The task search by id, idempotency key, worker or text, in one tenant or in all."""

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
from console.page import ConsolePage, get_tenant
from console.task import TONES
from core import errors
from core.admin.links import task_url
from queues import selectors
from queues.domain import Task, TaskStatus
from queues.models import AuditedResult
from queues.search import platform_search, tenant_search
from queues.search.tenant_search import TaskQuery
from tenants import scoping
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot

MAX_TERM_CHARS = 500
PAGE_SIZE = 50
# A search with neither a term nor a tenant lists the first tasks of each of this many tenants.
MAX_SAMPLED_TENANTS = 10


class FoundTask(NamedTuple):
    tid: str
    slug: str
    task: Task

    @property
    def url(self) -> str:
        return task_url(self.tid, self.task.id)

    @property
    def tone(self) -> str:
        return TONES.get(self.task.status, "")


class SearchResults(NamedTuple):
    tasks: Sequence[FoundTask] = ()
    cursor: str | None = None
    scope: str = ""  # sentences about the tenants and tasks that were searched


class SearchPage(ConsolePage):
    title = "Tasks"
    template_name = "console/search.html"

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        q = request.GET.get("q", "").strip()[:MAX_TERM_CHARS]
        tid = find_owner(request, q) if q else None
        if tid is not None:
            return redirect(task_url(tid, q.lower()))
        return super().get(request, *args, **kwargs)

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        request = self.request
        query = {
            name: request.GET.get(name, "").strip()[:MAX_TERM_CHARS] for name in ("q", "tenant", "command", "status")
        }
        visible = scoping.tenants_of(request.user).order_by("slug").values_list("tid", "slug")
        slugs = dict(visible[: platform_search.MAX_TENANTS + 1])
        tenant = get_tenant(request, query["tenant"]) if query["tenant"] else None
        results, problem = SearchResults(), ""
        if any(query.values()):
            try:
                results = _search(request, tenant, query, slugs, request.GET.get("cursor") or None)
            except errors.InvalidRequest as error:
                problem = deadletters.describe_error(error)
        more = urlencode({**query, "cursor": results.cursor}) if results.cursor else ""
        return super().get_context_data(
            query=query,
            has_query=any(query.values()),
            tenants=list(slugs.items()) if len(slugs) <= deadletters.MAX_LISTED_TENANTS else [],
            tenant=tenant,
            statuses=list(TaskStatus),
            tasks=results.tasks,
            scope=results.scope,
            problem=problem,
            next_url=f"{reverse('console:tasks')}?{more}" if more else "",
            **extra,
        )


def find_owner(request: HttpRequest, q: str) -> str | None:
    """Return the tid of the tenant that owns the task with this id.

    None if `q` is not a task id, no such task exists, or the user may not see its tenant.
    """
    try:
        task_id = str(uuid.UUID(q))
    except ValueError:
        return None
    # UUID also accepts texts that are not task ids, such as one without hyphens.
    if task_id != q.lower():
        return None
    audited = AuditedResult.objects.filter(pk=task_id).values_list("tenant_id", flat=True).first()
    tid = audited or selectors.find_tenant(task_id).run_sync()
    return tid if tid and scoping.has_role(request.user, tid) else None


def _search(
    request: HttpRequest,
    tenant: TenantSnapshot | None,
    query: dict[str, str],
    slugs: dict[str, str],
    cursor: str | None,
) -> SearchResults:
    """Search one tenant or all tenants.

    With neither a tenant nor a term, list the first tasks of each of the first tenants.
    """
    task_query = _parse_query(query)
    if tenant or len(slugs) == 1:
        return _search_tenant(tenant or get_tenant(request, next(iter(slugs))), task_query, cursor)
    if task_query.q is not None:
        return _search_platform(scoping.tids_of(request.user), slugs, task_query, cursor)
    limit = PAGE_SIZE // MAX_SAMPLED_TENANTS
    tenants = [tenant for tid in islice(slugs, MAX_SAMPLED_TENANTS) if (tenant := tenant_cache.find_by_tid(tid))]
    return SearchResults(
        tasks=[
            FoundTask(tenant.tid, tenant.slug, task)
            for tenant in tenants
            for task in tenant_search.page(tenant, task_query, limit=limit).tasks
        ],
        scope=f"Showing the first {limit} tasks of each of {_format_tenants(len(tenants), of=len(slugs))}. "
        "Select a tenant to see all of its tasks.",
    )


def _search_tenant(tenant: TenantSnapshot, query: TaskQuery, cursor: str | None) -> SearchResults:
    page = tenant_search.page(tenant, query, cursor=cursor, limit=PAGE_SIZE)
    return SearchResults(tasks=[FoundTask(tenant.tid, tenant.slug, task) for task in page.tasks], cursor=page.cursor)


def _search_platform(
    tids: list[str] | None, slugs: dict[str, str], query: TaskQuery, cursor: str | None
) -> SearchResults:
    page = platform_search.page(tids, list(slugs), query, cursor=cursor, limit=PAGE_SIZE)
    # An ended task may belong to a tenant that is not in `slugs`, which is limited, or to a deleted tenant.
    others = deadletters.read_slugs({row.tid for row in page.results} - slugs.keys())
    scope = f"Searched the live tasks of {_format_tenants(len(slugs), of=len(slugs))} by idempotency key and worker, "
    scope += "and all ended tasks by text."
    scope += " Some live tasks were left out. Select a tenant to search all of them." if page.is_cut else ""
    return SearchResults(
        tasks=[FoundTask(tid, slugs.get(tid) or others.get(tid, tid), task) for tid, task in page.results],
        cursor=page.cursor,
        scope=scope,
    )


def _format_tenants(count: int, *, of: int) -> str:
    if of > platform_search.MAX_TENANTS:
        return f"the first {min(count, platform_search.MAX_TENANTS):,} of your tenants"
    return f"your {count:,} tenants" if count == of else f"the first {count:,} of your {of:,} tenants"


def _parse_query(query: dict[str, str]) -> TaskQuery:
    status = query["status"]
    if status and status not in set(TaskStatus):
        raise errors.InvalidRequest("No such status. Select one from the list.")
    return TaskQuery(
        q=query["q"] or None, command=query["command"] or None, status=TaskStatus(status) if status else None
    )
