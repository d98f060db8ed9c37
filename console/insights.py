"""The page of charts: one tenant's history over a period, of one command where it is by command."""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import urlencode

import msgspec
from django.http import Http404
from django.urls import path, reverse

from console.page import Page, inside, tenant_of
from pipeline import charts
from pipeline.selectors import DateRange
from queues.engine.keys import COMMAND
from tenants import scoping

OFFERED = 200
USUAL_DAYS = 7
CHARTS = (
    ("ended", "How attempts ended", "attempts"),
    ("waited", "Wait for a worker", "{worst}"),
    ("ran", "Run time", "{worst}"),
    ("workers", "Workers for a mean wait of at most", "{worst}"),
    ("worked", "Worker time", "all commands, a day"),
    ("answered", "Webhooks", "all commands, deliveries tried"),
)


class InsightsPage(Page):
    title = "Insights"
    template_name = "console/insights.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        asked = {name: self.request.GET.get(name, "").strip() for name in ("tenant", "command", "days")}
        offered = list(scoping.tenants_of(self.request.user).order_by("slug").values_list("tid", "slug")[:OFFERED])
        if asked["command"] and COMMAND.fullmatch(asked["command"]) is None:
            raise Http404("No such queue.")
        tid = asked["tenant"] or (offered[0][0] if offered else "")
        tenant = tenant_of(self.request, tid) if tid else None
        if tenant and tid not in dict(offered):
            offered.append((tid, tenant.slug))
        context = super().get_context_data(
            tenants=offered,
            tenant=tenant,
            spans=list(charts.SPANS),
            span=_span(asked["days"]),
            last_run=charts.find_last_run(),
            tid=tid,
            **extra,
        )
        return context | _of_tenant(tid, asked["command"], context["span"]) if tid else context


def _of_tenant(tid: str, command: str, span: int) -> dict[str, Any]:
    """What there is to see of it; nothing where there is no history."""
    last = charts.find_latest_day(tid)
    if last is None:
        return {}
    # Up to where there is history: an installation whose pipeline stands still shows what it knows.
    until = last + dt.timedelta(days=1)
    days = DateRange(until - dt.timedelta(days=span), until)
    commands = charts.list_commands(tid, days)
    command = command or (commands[0] if commands else "")
    worst = "by hour" if charts.SPANS[span] < dt.timedelta(days=1) else "worst hour of each day"
    groups, is_cut = charts.list_failures(tid, command, days)
    return {
        "command": command,
        "commands": commands,
        "days": days,
        "last": last,
        "charts": [{"name": n, "title": title, "unit": unit.format(worst=worst)} for n, title, unit in CHARTS],
        "courses": msgspec.to_builtins(charts.build_charts(tid, command, days)),
        "totals": charts.sum_totals(tid, command, days),
        "groups": [(group, _task_url(tid, group.example)) for group in groups],
        "is_cut": is_cut,
        "leases": charts.list_lease_advice(tid, days),
        "endpoints": charts.list_endpoints(tid, days),
    }


def _span(text: str) -> int:
    if not text:
        return USUAL_DAYS
    if not text.isascii() or not text.isdigit() or int(text) not in charts.SPANS:
        raise Http404("No such time.")
    return int(text)


def _task_url(tid: str, task_id: str) -> str:
    return f"{reverse('console:task')}?{urlencode({'tenant': tid, 'id': task_id})}"


app_name = "insights"
urlpatterns = [path("console/insights/", inside(InsightsPage), name="page")]
