"""Dead letters: what they died of, which ones, and what to do about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import reverse

from console.actions import Act, recorded
from console.page import Guarded, Page, tenant_of
from core import errors
from core.admin.links import task_url
from core.failure_fingerprint import normalise
from queues.deadletters import exports, failure_groups, queries
from queues.deadletters.queries import Filter
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tenants.scoping import Role

# More tenants than these are no list to choose from: a name has to be written.
TENANTS = 200
AGES = {
    "hour": ("in the last hour", timedelta(hours=1), None),
    "day": ("in the last day", timedelta(days=1), None),
    "week": ("in the last week", timedelta(days=7), None),
    "older": ("more than a day ago", None, timedelta(days=1)),
}
FILTERS = ("command", "failure", "text", "error", "deliveriesFrom", "deliveriesTo", "jsonPath")
NAMES = (*FILTERS, "tenant", "age")


class Asked(NamedTuple):
    """The dead letters that a page or an act is about."""

    tids: list[str] | None
    tenant: TenantSnapshot | None
    filter: Filter
    query: dict[str, str]  # the same as a page's query says it

    def url(self, name: str, **more: str) -> str:
        return f"{reverse(name)}?{urlencode({**self.query, **more})}"


class GroupsPage(Page):
    """Which failures there are, the most frequent first."""

    title = "Dead letters"
    template_name = "console/dead_groups.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        asked = read(self.request)
        found = failure_groups.groups(asked.tids, command=asked.filter.command)
        slugs = slugs_of(group.tid for group in found)
        groups = [
            {
                "group": group,
                "name": normalise(group.error),
                "slug": slugs.get(group.tid, group.tid),
                "url": f"{reverse('console:dead-list')}?"
                f"{urlencode({'tenant': group.tid, 'command': group.command, 'failure': group.failure})}",
            }
            for group in found
        ]
        return super().get_context_data(
            groups=groups,
            total=sum(group.count for group in found),
            is_cut=len(found) == failure_groups.MAX_GROUPS,
            **form(self.request, asked),
            **extra,
        )


class ListPage(Page):
    """One by one, the newest first."""

    title = "Dead letters"
    template_name = "console/dead_list.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        request = self.request
        page = queries.DeadLetterPage(letters=[], cursor=None)
        count: int | None = 0
        problem = ""
        asked = Asked([], None, Filter(), {})
        try:
            asked = read(request)
            page = queries.page(asked.tids, asked.filter, cursor=request.GET.get("cursor") or None)
            count = queries.count(asked.tids, asked.filter)
        except errors.InvalidRequest as error:
            problem = str(error)
        slugs = slugs_of(letter.tid for letter in page.letters)
        rows = [
            {
                "letter": letter,
                "slug": slugs.get(letter.tid, letter.tid),
                "url": task_url(letter.tid, letter.id),
                "key": f"{letter.tid}:{letter.id}",
                "may_act": scoping.has_role(request.user, letter.tid, Role.OPERATOR),
            }
            for letter in page.letters
        ]
        return super().get_context_data(
            rows=rows,
            count=count,
            problem=problem,
            next_url=asked.url("console:dead-list", cursor=page.cursor) if page.cursor else "",
            is_first="cursor" not in request.GET,
            may_act=scoping.has_role(request.user, asked.tenant.tid if asked.tenant else None, Role.OPERATOR),
            bulk_urls=[
                (name, icon, asked.url("console:bulk-new", kind=kind)) for kind, name, icon in BULK if asked.tenant
            ],
            exports=[(name, asked.url("console:dead-export", format=key)) for key, name in EXPORTS],
            **form(request, asked),
            **extra,
        )


BULK = (("replay", "Replay all that match", "replay"), ("delete", "Delete all that match", "delete_sweep"))
EXPORTS = (("csv", "CSV"), ("jsonl", "JSON Lines"))


class Export(Guarded):
    """All that match, as they come from the database: the page holds none of it."""

    def get(self, request: HttpRequest) -> StreamingHttpResponse:
        asked = read(request)
        rows = exports.rows(asked.tids, asked.filter)
        is_csv = request.GET.get("format") == "csv"
        lines = exports.as_csv(rows) if is_csv else exports.as_json_lines(rows)
        answer = StreamingHttpResponse(
            lines, content_type="text/csv; charset=utf-8" if is_csv else "application/x-ndjson"
        )  # fmt: skip
        answer["Content-Disposition"] = f'attachment; filename="dead-letters.{"csv" if is_csv else "jsonl"}"'
        return answer


class SelectedAct(Act):
    """An act on the dead letters that were ticked, of several tenants perhaps: on all of those or on none."""

    back = "console:dead-list"

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        picked: dict[str, list[str]] = defaultdict(list)
        for key in request.POST.getlist("ids"):
            tid, _, task_id = key.partition(":")
            picked[tid].append(task_id)
        tenants = [tenant_of(request, tid, self.least) for tid in picked]
        reason = self.reason()
        if reason:
            done: list[errors.CodeqError | None] = []
            for tenant in tenants:
                ids = picked[tenant.tid]
                with recorded(request, tenant, f"{self.verb} {len(ids)} dead letters ({', '.join(ids)})"[:900], reason):
                    done += self.do(tenant, ids)
            tell(request, self.verb, done)
        return self.leave()

    verb = ""

    def do(self, tenant: TenantSnapshot, task_ids: list[str]) -> list[errors.CodeqError | None]:
        raise NotImplementedError


class ReplaySelected(SelectedAct):
    verb = "Replayed"

    def do(self, tenant: TenantSnapshot, task_ids: list[str]) -> list[errors.CodeqError | None]:
        answers = queries.replay(tenant, task_ids)
        return [answer if isinstance(answer, errors.CodeqError) else None for answer in answers]


class DeleteSelected(SelectedAct):
    verb = "Deleted"

    def do(self, tenant: TenantSnapshot, task_ids: list[str]) -> list[errors.CodeqError | None]:
        return queries.delete(tenant, task_ids)


def tell(request: HttpRequest, verb: str, wrong: list[errors.CodeqError | None]) -> None:
    """How many, and of those that were not done, why: `12 replayed, 3 skipped: not dead`."""
    done = wrong.count(None)
    words = f"{done} {verb.lower()}"
    if skipped := [error for error in wrong if error is not None]:
        words += f", {len(skipped)} skipped: {'; '.join(sorted({str(error) for error in skipped}))}"
    (messages.warning if skipped else messages.success)(request, words)


def read(request: HttpRequest, given: Mapping[str, str] | None = None) -> Asked:
    """Which dead letters the query means, of the tenants the person may see. InvalidRequest where it means none."""
    values = request.GET if given is None else given
    query = {name: values[name].strip() for name in NAMES if values.get(name, "").strip()}
    mine = scoping.tids_of(request.user)
    if mine is not None and len(mine) == 1:
        query.setdefault("tenant", mine[0])
    tenant = tenant_of(request, query["tenant"]) if "tenant" in query else None
    if tenant:
        query["tenant"] = tenant.tid
    asked: dict[str, Any] = {name: query[name] for name in FILTERS if name in query}
    if age := AGES.get(query.get("age", "")):
        now = datetime.now(UTC)
        _, within, before = age
        asked |= {"diedAfter": now - within} if within else {"diedBefore": now - (before or timedelta())}
    try:
        meant = msgspec.convert(asked, Filter, strict=False)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(str(error)) from error
    return Asked([tenant.tid] if tenant else mine, tenant, meant, query)


def form(request: HttpRequest, asked: Asked) -> dict[str, Any]:
    """What the filters on a page offer and say now."""
    tenants = list(scoping.tenants_of(request.user).order_by("slug").values_list("tid", "slug")[: TENANTS + 1])
    return {
        "tenants": tenants if len(tenants) <= TENANTS else [],
        "tenant": asked.tenant,
        "ages": [(key, words) for key, (words, _, _) in AGES.items()],
        "query": {**dict.fromkeys(NAMES, ""), **asked.query},
        "is_filtered": any(request.GET.get(name) for name in NAMES),
        "groups_url": asked_url("console:dead", asked, ("tenant", "command")),
        "list_url": asked.url("console:dead-list"),
    }


def asked_url(name: str, asked: Asked, keep: Iterable[str]) -> str:
    return f"{reverse(name)}?{urlencode({key: asked.query[key] for key in keep if key in asked.query})}"


def slugs_of(tids: Iterable[str]) -> dict[str, str]:
    return dict(Tenant.objects.filter(tid__in=set(tids)).values_list("tid", "slug"))
