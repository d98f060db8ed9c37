"""The pages of dead letters: groups by failure, list, export, actions on selected rows."""

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

from console.actions import OperatorAction, record_action
from console.page import ConsolePage, ConsoleView, get_tenant
from core import errors
from core.admin.links import task_url
from core.failure_fingerprint import normalise
from queues.deadletters import exports, failure_groups, queries
from queues.deadletters.queries import Filter
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tenants.scoping import Role

# With more tenants, the filter is a text field for the slug instead of a list.
MAX_LISTED_TENANTS = 200
# Parameter -> label, maximum age, minimum age.
AGES = {
    "hour": ("in the last hour", timedelta(hours=1), None),
    "day": ("in the last day", timedelta(days=1), None),
    "week": ("in the last week", timedelta(days=7), None),
    "older": ("more than a day ago", None, timedelta(days=1)),
}
FILTERS = ("command", "failure", "text", "error", "deliveriesFrom", "deliveriesTo", "jsonPath")
# Parameter or field of a filter -> its name on the pages.
FIELD_NAMES = {
    "command": "queue", "deliveriesFrom": "min. attempts", "deliveriesTo": "max. attempts",
    "jsonPath": "JSON path", "age": "last failure", "diedAfter": "last failure after",
    "diedBefore": "last failure before",
}  # fmt: skip
PARAMETERS = (*FILTERS, "tenant", "age")


class DeadLetterQuery(NamedTuple):
    """The tenants and the filter of a page or an action."""

    tids: list[str] | None  # None: all tenants
    tenant: TenantSnapshot | None
    filter: Filter
    parameters: dict[str, str]  # the filter and the tenant as parameters of a URL

    def url(self, name: str, **more: str) -> str:
        return f"{reverse(name)}?{urlencode({**self.parameters, **more})}"


class FailureGroupsPage(ConsolePage):
    """Dead letters grouped by failure, the largest group first."""

    title = "Dead letters"
    template_name = "console/dead_groups.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        query = parse_query(self.request)
        groups = failure_groups.groups(query.tids, command=query.filter.command)
        slugs = read_slugs(group.tid for group in groups)
        rows = [
            {
                "group": group,
                "name": normalise(group.error),
                "slug": slugs.get(group.tid, group.tid),
                "url": f"{reverse('console:dead-list')}?"
                f"{urlencode({'tenant': group.tid, 'command': group.command, 'failure': group.failure})}",
            }
            for group in groups
        ]
        return super().get_context_data(
            rows=rows,
            total=sum(group.count for group in groups),
            is_truncated=len(groups) == failure_groups.MAX_GROUPS,
            **build_filter_context(self.request, query),
            **extra,
        )


class DeadLetterListPage(ConsolePage):
    """The dead letters that match the filters, the newest first."""

    title = "Dead letters"
    template_name = "console/dead_list.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        request = self.request
        page = queries.DeadLetterPage(letters=[], cursor=None)
        count: int | None = 0
        problem = ""
        query = DeadLetterQuery([], None, Filter(), {})
        try:
            query = parse_query(request)
            page = queries.page(query.tids, query.filter, cursor=request.GET.get("cursor") or None)
            count = queries.count(query.tids, query.filter)
        except errors.InvalidRequest as error:
            problem = describe_error(error)
        slugs = read_slugs(letter.tid for letter in page.letters)
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
            next_url=query.url("console:dead-list", cursor=page.cursor) if page.cursor else "",
            is_first="cursor" not in request.GET,
            may_act=scoping.has_role(request.user, query.tenant.tid if query.tenant else None, Role.OPERATOR),
            bulk_urls=[
                (name, icon, query.url("console:bulk-new", kind=kind))
                for kind, name, icon in BULK_LINKS
                if query.tenant
            ],
            exports=[(name, query.url("console:dead-export", format=key)) for key, name in EXPORTS],
            **build_filter_context(request, query),
            **extra,
        )


BULK_LINKS = (("replay", "Replay all matching", "replay"), ("delete", "Delete all matching", "delete_sweep"))
EXPORTS = (("csv", "CSV"), ("jsonl", "JSON Lines"))


class ExportDeadLetters(ConsoleView):
    """A file with all dead letters that match, streamed from the database."""

    def get(self, request: HttpRequest) -> StreamingHttpResponse:
        query = parse_query(request)
        rows = exports.rows(query.tids, query.filter)
        is_csv = request.GET.get("format") == "csv"
        lines = exports.as_csv(rows) if is_csv else exports.as_json_lines(rows)
        response = StreamingHttpResponse(
            lines, content_type="text/csv; charset=utf-8" if is_csv else "application/x-ndjson"
        )  # fmt: skip
        response["Content-Disposition"] = f'attachment; filename="dead-letters.{"csv" if is_csv else "jsonl"}"'
        return response


class SelectedDeadLettersAction(OperatorAction):
    """An action on the selected dead letters.

    If the user lacks the role in the tenant of any of them, nothing is changed.
    """

    next_page = "console:dead-list"
    verb = ""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        selected: dict[str, list[str]] = defaultdict(list)
        for key in request.POST.getlist("ids"):
            tid, _, task_id = key.partition(":")
            selected[tid].append(task_id)
        tenants = [get_tenant(request, tid, self.required_role) for tid in selected]
        reason = self.read_reason()
        if reason:
            outcomes: list[errors.CodeqError | None] = []
            for tenant in tenants:
                ids = selected[tenant.tid]
                action = f"{self.verb} {len(ids)} dead letters ({', '.join(ids)})"[:900]
                with record_action(request, tenant, action, reason):
                    outcomes += self.perform_batch(tenant, ids)
            add_outcome_message(request, self.verb, outcomes)
        return self.redirect_back()

    def perform_batch(self, tenant: TenantSnapshot, task_ids: list[str]) -> list[errors.CodeqError | None]:
        """Do the action and return the error of each task, or None."""
        raise NotImplementedError


class ReplaySelected(SelectedDeadLettersAction):
    verb = "Replayed"

    def perform_batch(self, tenant: TenantSnapshot, task_ids: list[str]) -> list[errors.CodeqError | None]:
        outcomes = queries.replay(tenant, task_ids)
        return [outcome if isinstance(outcome, errors.CodeqError) else None for outcome in outcomes]


class DeleteSelected(SelectedDeadLettersAction):
    verb = "Deleted"

    def perform_batch(self, tenant: TenantSnapshot, task_ids: list[str]) -> list[errors.CodeqError | None]:
        return queries.delete(tenant, task_ids)


def add_outcome_message(request: HttpRequest, verb: str, outcomes: list[errors.CodeqError | None]) -> None:
    """Add a message with the counts, and with the errors of the skipped tasks.

    It reads `12 replayed, 3 skipped: ` and then each different error once.
    """
    text = f"{outcomes.count(None)} {verb.lower()}"
    if skipped := [error for error in outcomes if error is not None]:
        text += f", {len(skipped)} skipped: {'; '.join(sorted({str(error) for error in skipped}))}"
    (messages.warning if skipped else messages.success)(request, text)


def parse_query(request: HttpRequest, values: Mapping[str, str] | None = None) -> DeadLetterQuery:
    """Parse the filters in the query string, or in `values`. May raise InvalidRequest.

    Without a tenant the query covers all tenants that the user may see.
    """
    values = request.GET if values is None else values
    parameters = {name: values[name].strip() for name in PARAMETERS if values.get(name, "").strip()}
    visible_tids = scoping.tids_of(request.user)
    if visible_tids is not None and len(visible_tids) == 1:
        parameters.setdefault("tenant", visible_tids[0])
    tenant = get_tenant(request, parameters["tenant"]) if "tenant" in parameters else None
    if tenant:
        parameters["tenant"] = tenant.tid
    fields: dict[str, Any] = {name: parameters[name] for name in FILTERS if name in parameters}
    if age := AGES.get(parameters.get("age", "")):
        now = datetime.now(UTC)
        _, max_age, min_age = age
        fields |= {"diedAfter": now - max_age} if max_age else {"diedBefore": now - (min_age or timedelta())}
    try:
        letter_filter = msgspec.convert(fields, Filter, strict=False)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(str(error)) from error
    return DeadLetterQuery([tenant.tid] if tenant else visible_tids, tenant, letter_filter, parameters)


def describe_error(error: errors.InvalidRequest) -> str:
    """Return the error's message, with the page's name of the field instead of the API's."""
    field, separator, message = str(error).partition(": ")
    name = FIELD_NAMES.get(field, field)
    return f"{name[:1].upper()}{name[1:]}{separator}{message}"


def build_filter_context(request: HttpRequest, query: DeadLetterQuery) -> dict[str, Any]:
    """Return the choices and current values of the filters, for the template."""
    tenants = list(
        scoping.tenants_of(request.user).order_by("slug").values_list("tid", "slug")[: MAX_LISTED_TENANTS + 1]
    )
    return {
        "tenants": tenants if len(tenants) <= MAX_LISTED_TENANTS else [],
        "tenant": query.tenant,
        "ages": [(key, label) for key, (label, _, _) in AGES.items()],
        "query": {**dict.fromkeys(PARAMETERS, ""), **query.parameters},
        "is_filtered": any(request.GET.get(name) for name in PARAMETERS),
        "groups_url": _groups_url(query),
        "list_url": query.url("console:dead-list"),
    }


def _groups_url(query: DeadLetterQuery) -> str:
    shared: dict[str, object] = {
        name: query.parameters[name] for name in ("tenant", "command") if name in query.parameters
    }
    return f"{reverse('console:dead')}?{urlencode(shared)}"


def read_slugs(tids: Iterable[str]) -> dict[str, str]:
    return dict(Tenant.objects.filter(tid__in=set(tids)).values_list("tid", "slug"))
