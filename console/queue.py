"""The page of a queue: depths, charts, next tasks, leases and policy; pause and resume."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import msgspec
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse

from console import policy
from console.actions import OperatorAction, record_action
from console.page import ConsolePage, ConsoleView, get_tenant
from queues import selectors, services
from queues.domain import QueuePeek, QueueStats
from queues.engine.keys import COMMAND
from queues.stats import charts
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.scoping import Role

# Maximum number of tasks in each list of the page.
LISTED_TASKS = 10


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The live part of the page. Ages are computed from `now_ms`, not from the browser's clock."""

    now_ms: int
    stats: QueueStats
    peek: QueuePeek


SPANS = (("1h", "1 hour"), ("24h", "24 hours"), ("7d", "7 days"))
CHARTS = (
    ("depth", "Depth", "tasks"), ("outcomes", "Outcomes", "attempts"), ("waits", "Wait time", "until claimed"),
    ("runs", "Run time", "from claim to end"),
)  # fmt: skip


class QueuePage(ConsolePage):
    template_name = "console/queue.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        tenant, command = parse_queue(self.request)
        query = urlencode({"tenant": tenant.tid, "command": command})
        return super().get_context_data(
            title=f"Queue {command}",
            subtitle=tenant.slug,
            tenant=tenant,
            command=command,
            live=msgspec.to_builtins(read_state(tenant, command)),
            spans=[{"key": key, "name": name} for key, name in SPANS],
            charts=[{"name": name, "title": title, "note": note} for name, title, note in CHARTS],
            fields={"tenant": tenant.tid, "command": command},
            query=query,
            dead_url=f"{reverse('console:dead')}?{query}",
            may_act=scoping.has_role(self.request.user, tenant.tid, Role.OPERATOR),
            may_set_policy=scoping.has_role(self.request.user, tenant.tid, Role.ADMIN),
            policy=policy.build_context(tenant, command),
            backoffs=policy.BACKOFFS,
            **extra,
        )


class QueueData(ConsoleView):
    """The live part of the page as JSON."""

    def get(self, request: HttpRequest) -> HttpResponse:
        tenant, command = parse_queue(request)
        return HttpResponse(msgspec.json.encode(read_state(tenant, command)), content_type="application/json")


class QueueChartData(ConsoleView):
    """The time series of the charts as JSON."""

    def get(self, request: HttpRequest) -> HttpResponse:
        tenant, command = parse_queue(request)
        span = request.GET.get("span", "1h")
        if span not in charts.SPANS:
            raise Http404("No such period.")
        now = datetime.now(UTC).replace(second=0, microsecond=0)
        time_series = charts.time_series(tenant.tid, command, span, now)
        return HttpResponse(msgspec.json.encode(time_series), content_type="application/json")


class PauseQueue(OperatorAction):
    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with record_action(self.request, tenant, f"Paused queue {command}", reason):
            services.pause(tenant, command).run_sync()
        return f"Queue {command} paused. Workers get no tasks from it."


class ResumeQueue(OperatorAction):
    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with record_action(self.request, tenant, f"Resumed queue {command}", reason):
            services.resume(tenant, command).run_sync()
        return f"Queue {command} resumed."


def parse_queue(request: HttpRequest) -> tuple[TenantSnapshot, str]:
    """Return the tenant and the queue in the query string, or raise a 404."""
    command = request.GET.get("command", "")
    if re.fullmatch(COMMAND, command) is None:
        raise Http404("No such queue.")
    return get_tenant(request, request.GET.get("tenant", "")), command


def read_state(tenant: TenantSnapshot, command: str) -> QueueState:
    return QueueState(
        now_ms=round(datetime.now(UTC).timestamp() * 1000),
        stats=selectors.queue_stats(tenant, command).run_sync(),
        peek=selectors.peek(tenant, command, LISTED_TASKS).run_sync(),
    )
