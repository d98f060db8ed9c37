"""The charts page: the history of a tenant and one of its queues over a period."""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import urlencode

import msgspec
from django.http import Http404
from django.urls import path, reverse

from console.page import ConsolePage, as_admin_view, get_tenant
from pipeline import charts
from pipeline.selectors import DateRange
from queues.engine.keys import COMMAND
from tenants import scoping

# The maximum number of tenants in the page's list.
MAX_LISTED_TENANTS = 200
DEFAULT_DAYS = 7
CHARTS = (
    ("ended", "Outcomes", "attempts"),
    ("wait_time", "Wait time", "{resolution}"),
    ("run_time", "Run time", "{resolution}"),
    ("workers", "Workers needed", "for a mean wait of at most 60, 10 or 1 s, {resolution}"),
    ("worker_time", "Worker time", "all queues, per day"),
    ("deliveries", "Webhook deliveries", "all queues, attempts"),
)


class ChartsPage(ConsolePage):
    title = "Charts"
    template_name = "console/charts.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        query = {name: self.request.GET.get(name, "").strip() for name in ("tenant", "command", "days")}
        tenants = list(
            scoping.tenants_of(self.request.user).order_by("slug").values_list("tid", "slug")[:MAX_LISTED_TENANTS]
        )
        if query["command"] and COMMAND.fullmatch(query["command"]) is None:
            raise Http404("No such queue.")
        tid = query["tenant"] or (tenants[0][0] if tenants else "")
        tenant = get_tenant(self.request, tid) if tid else None
        if tenant and tid not in dict(tenants):
            tenants.append((tid, tenant.slug))
        context = super().get_context_data(
            tenants=tenants,
            tenant=tenant,
            spans=list(charts.SPANS),
            span=_parse_days(query["days"]),
            last_publication=charts.find_last_publication(),
            tid=tid,
            **extra,
        )
        return context | _build_context(tid, query["command"], context["span"]) if tid else context


def _build_context(tid: str, command: str, span: int) -> dict[str, Any]:
    """Read a tenant's charts and tables from the marts; return {} if it has no history."""
    last = charts.find_latest_day(tid)
    if last is None:
        return {}
    # The period ends with the latest day in the marts, so that the page is not empty while the pipeline is down.
    until = last + dt.timedelta(days=1)
    period = DateRange(until - dt.timedelta(days=span), until)
    commands = charts.list_commands(tid, period)
    command = command or (commands[0] if commands else "")
    resolution = "per hour" if charts.SPANS[span] < dt.timedelta(days=1) else "worst hour of each day"
    groups, is_cut = charts.list_failures(tid, command, period)
    return {
        "command": command,
        "commands": commands,
        "period": period,
        "last": last,
        "charts": [
            {"name": name, "title": title, "note": note.format(resolution=resolution)} for name, title, note in CHARTS
        ],
        "time_series": msgspec.to_builtins(charts.build_charts(tid, command, period)),
        "totals": charts.sum_totals(tid, command, period),
        "groups": [(group, _task_url(tid, group.example)) for group in groups],
        "is_cut": is_cut,
        "leases": charts.list_lease_advice(tid, period),
        "endpoints": charts.list_endpoints(tid, period),
    }


def _parse_days(text: str) -> int:
    if not text:
        return DEFAULT_DAYS
    if not text.isascii() or not text.isdigit() or int(text) not in charts.SPANS:
        raise Http404("No such period.")
    return int(text)


def _task_url(tid: str, task_id: str) -> str:
    return f"{reverse('console:task')}?{urlencode({'tenant': tid, 'id': task_id})}"


app_name = "charts"
urlpatterns = [path("console/insights/", as_admin_view(ChartsPage), name="page")]
