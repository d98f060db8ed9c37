"""One queue: how deep and how fast, who is next, who works on what; pausing and resuming it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import msgspec
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse

from console import policy
from console.actions import Act, recorded
from console.page import Guarded, Page, tenant_of
from queues import selectors, services
from queues.domain import QueuePeek, QueueStats
from queues.engine.keys import COMMAND
from queues.stats import charts
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.scoping import Role

SHOWN = 10


class Live(msgspec.Struct, frozen=True, kw_only=True):
    now_ms: int
    stats: QueueStats
    peeked: QueuePeek


SPANS = (("1h", "1 hour"), ("24h", "24 hours"), ("7d", "7 days"))
CHARTS = (
    ("depth", "Depth", "tasks"), ("outcomes", "Outcomes", "attempts"), ("waits", "Wait", "until claimed"),
    ("runs", "Run time", "from claim to end"),
)  # fmt: skip


class QueuePage(Page):
    template_name = "console/queue.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        tenant, command = asked(self.request)
        query = urlencode({"tenant": tenant.tid, "command": command})
        return super().get_context_data(
            title=f"Queue {command}",
            subtitle=tenant.slug,
            tenant=tenant,
            command=command,
            live=msgspec.to_builtins(live(tenant, command)),
            spans=[{"key": key, "name": name} for key, name in SPANS],
            charts=[{"name": name, "title": title, "unit": unit} for name, title, unit in CHARTS],
            fields={"tenant": tenant.tid, "command": command},
            query=query,
            dead_url=f"{reverse('console:dead')}?{query}",
            may_act=scoping.has_role(self.request.user, tenant.tid, Role.OPERATOR),
            may_rule=scoping.has_role(self.request.user, tenant.tid, Role.ADMIN),
            policy=policy.shown(tenant, command),
            backoffs=policy.BACKOFFS,
            **extra,
        )


class QueueData(Guarded):
    def get(self, request: HttpRequest) -> HttpResponse:
        tenant, command = asked(request)
        return HttpResponse(msgspec.json.encode(live(tenant, command)), content_type="application/json")


class QueueCourse(Guarded):
    """What the charts show."""

    def get(self, request: HttpRequest) -> HttpResponse:
        tenant, command = asked(request)
        span = request.GET.get("span", "1h")
        if span not in charts.SPANS:
            raise Http404("No such span.")
        now = datetime.now(UTC).replace(second=0, microsecond=0)
        found = charts.time_series(tenant.tid, command, span, now)
        return HttpResponse(msgspec.json.encode(found), content_type="application/json")


class PauseQueue(Act):
    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with recorded(self.request, tenant, f"Paused queue {command}", reason):
            services.pause(tenant, command).run_sync()
        return f"{command} is paused: workers get nothing from it."


class ResumeQueue(Act):
    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        command = self.request.POST.get("command", "")
        with recorded(self.request, tenant, f"Resumed queue {command}", reason):
            services.resume(tenant, command).run_sync()
        return f"{command} goes on."


def asked(request: HttpRequest) -> tuple[TenantSnapshot, str]:
    """The queue a request names, of a tenant the person may see."""
    command = request.GET.get("command", "")
    if re.fullmatch(COMMAND, command) is None:
        raise Http404("No such queue.")
    return tenant_of(request, request.GET.get("tenant", "")), command


def live(tenant: TenantSnapshot, command: str) -> Live:
    return Live(
        now_ms=round(datetime.now(UTC).timestamp() * 1000),
        stats=selectors.queue_stats(tenant, command).run_sync(),
        peeked=selectors.peek(tenant, command, SHOWN).run_sync(),
    )
