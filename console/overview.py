"""The first page: every queue a person may see, live."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db.models import F, Max, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from console.page import Guarded, Page
from core.redis.connections import reachable_tenants
from queues import health_checks, selectors
from queues.health_checks import Sign
from queues.models import QueueSample
from queues.stats import charts
from queues.stats.sampler import LOOKBACK
from tenants import scoping
from tenants.models import Tenant
from webhooks.models import Delivery

# Read live and together. Of more tenants than these, the busiest are shown; the others are found by name.
TENANTS = 200
COUNTED = 10_000
OVERDUE = timedelta(minutes=1)
DAY = timedelta(days=1)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    tid: str
    tenant: str
    command: str
    ready: int
    delayed: int
    in_progress: int
    dead: int
    oldest_seconds: float | None
    is_paused: bool
    is_suspended: bool


class Shown(Sign, frozen=True, kw_only=True):
    url: str  # where there is more to see; empty where there is not, or not for this person


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[Row]
    signs: list[Shown]
    tenants: int
    is_partial: bool  # more tenants than could be shown
    pulses: dict[str, charts.QueueRates] | None = None  # by "tid:command"


class OverviewPage(Page):
    title = "Overview"
    template_name = "console/overview.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        found = overview(self.request, datetime.now(UTC), with_pulses=True)
        return super().get_context_data(overview=msgspec.to_builtins(found), **extra)


class OverviewData(Guarded):
    """The same as JSON. Depths come live at each call; `pulses=1` adds what changes once a minute."""

    def get(self, request: HttpRequest) -> HttpResponse:
        found = overview(request, datetime.now(UTC), with_pulses="pulses" in request.GET)
        return HttpResponse(msgspec.json.encode(found), content_type="application/json")


def overview(request: HttpRequest, now: datetime, *, with_pulses: bool) -> Overview:
    mine = scoping.tenants_of(request.user)
    if term := request.GET.get("tenant", "").strip():
        mine = mine.filter(slug__icontains=term)
    tenants, is_partial = _shown(mine, now)
    rows = [
        Row(
            tid=tid,
            tenant=tenants[tid].slug,
            command=queue.command,
            ready=queue.ready,
            delayed=queue.delayed,
            in_progress=queue.in_progress,
            dead=queue.dlq,
            oldest_seconds=_age(queue.oldest_ready_ms, now),
            is_paused=queue.is_paused,
            is_suspended=tenants[tid].is_suspended,
        )
        for tid, queues in selectors.queues_of(reachable_tenants(tenants)).run_sync().items()
        for queue in queues
    ]
    pulses = None
    if with_pulses:
        pulses = {f"{tid}:{command}": pulse for (tid, command), pulse in charts.queue_rates(tenants, now).items()}
    return Overview(rows=rows, signs=signs(request, now), tenants=len(tenants), is_partial=is_partial, pulses=pulses)


def signs(request: HttpRequest, now: datetime) -> list[Shown]:
    """Whether all is well, each with the way to what is behind it."""
    is_unlimited = scoping.is_unlimited(request.user)
    jobs = reverse("admin:queues_beatjob_changelist") if is_unlimited else ""
    found = [(health_checks.beat(now), jobs), (health_checks.audit(), jobs)]
    if is_unlimited:
        found.append((health_checks.quarantine(), reverse("admin:queues_quarantine_changelist")))
    found.append((deliveries(request, now), reverse("admin:webhooks_delivery_changelist")))
    stored = health_checks.store()
    # How full the installation is, and where it runs, is not a tenant's business; whether their tasks are safe is.
    found += [(sign, "") for sign in (stored if is_unlimited else stored[1:2])]
    return [Shown(name=sign.name, is_well=sign.is_well, says=sign.says, url=url) for sign, url in found]


def deliveries(request: HttpRequest, now: datetime) -> Sign:
    """Callbacks that wait longer than they should, and those that were given up today."""
    rows = scoping.filter_visible(Delivery.objects.all(), request.user)
    overdue = rows.filter(status=Delivery.Status.PENDING, due_at__lt=now - OVERDUE)[: COUNTED + 1].count()
    given_up = rows.filter(status=Delivery.Status.GIVEN_UP, ended_at__gt=now - DAY)[: COUNTED + 1].count()
    words = [f"{_many(overdue)} overdue"] if overdue else []
    words += [f"{_many(given_up)} given up today"] if given_up else []
    return Sign(name="Deliveries", is_well=not words, says=", ".join(words) or "on time")


def _shown(mine: QuerySet[Tenant], now: datetime) -> tuple[dict[str, Tenant], bool]:
    found = list(mine.order_by("slug")[: TENANTS + 1])
    if len(found) <= TENANTS:
        return {tenant.tid: tenant for tenant in found}, False
    busiest = (
        QueueSample.objects.filter(at__gt=now - LOOKBACK, tenant__in=mine)
        .values("tenant")
        .annotate(most=Max(F("ready") + F("delayed") + F("in_progress") + F("dead")))
        .order_by("-most")
        .values_list("tenant", flat=True)[:TENANTS]
    )
    return {tenant.tid: tenant for tenant in mine.filter(tid__in=list(busiest))}, True


def _age(oldest_ms: int | None, now: datetime) -> float | None:
    return None if oldest_ms is None else max(0.0, now.timestamp() - oldest_ms / 1000)


def _many(count: int) -> str:
    return f"more than {COUNTED:,}" if count > COUNTED else f"{count:,}"
