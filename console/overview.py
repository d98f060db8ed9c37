"""The overview: live depths and rates of all queues that the user may see."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db.models import F, Max, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from console.page import ConsolePage, ConsoleView
from core.redis.connections import reachable_tenants
from queues import health_checks, selectors
from queues.health_checks import Check
from queues.models import QueueSample
from queues.stats import charts
from queues.stats.sampler import LOOKBACK
from tenants import scoping
from tenants.models import Tenant
from webhooks.models import Delivery

# The page reads all queues of its tenants at once, so the number of tenants is limited. If there are more, it shows
# the busiest.
MAX_TENANTS = 200
# Larger counts are shown as "more than 10,000".
COUNT_LIMIT = 10_000
OVERDUE_AFTER = timedelta(minutes=1)
DAY = timedelta(days=1)


class DisplayedQueue(msgspec.Struct, frozen=True, kw_only=True):
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


class DisplayedCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A health check and the page with its details."""

    name: str
    is_well: bool
    message: str
    url: str  # empty if there is no such page, or the user may not open it


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    queues: list[DisplayedQueue]
    checks: list[DisplayedCheck]
    is_partial: bool  # there are more tenants than the page shows
    rates: dict[str, charts.QueueRates] | None = None  # "tid:command" -> rates


class OverviewPage(ConsolePage):
    title = "Overview"
    template_name = "console/overview.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        overview = read_overview(self.request, datetime.now(UTC), with_rates=True)
        return super().get_context_data(overview=msgspec.to_builtins(overview), **extra)


class OverviewData(ConsoleView):
    """The overview as JSON. `rates=1` adds the rates, which change once a minute."""

    def get(self, request: HttpRequest) -> HttpResponse:
        overview = read_overview(request, datetime.now(UTC), with_rates="rates" in request.GET)
        return HttpResponse(msgspec.json.encode(overview), content_type="application/json")


def read_overview(request: HttpRequest, now: datetime, *, with_rates: bool) -> Overview:
    visible_tenants = scoping.tenants_of(request.user)
    if term := request.GET.get("tenant", "").strip():
        visible_tenants = visible_tenants.filter(slug__icontains=term)
    tenants, is_partial = _choose_tenants(visible_tenants, now)
    displayed_queues = [
        DisplayedQueue(
            tid=tid,
            tenant=tenants[tid].slug,
            command=queue.command,
            ready=queue.ready,
            delayed=queue.delayed,
            in_progress=queue.in_progress,
            dead=queue.dlq,
            oldest_seconds=_age_seconds(queue.oldest_ready_ms, now),
            is_paused=queue.is_paused,
            is_suspended=tenants[tid].is_suspended,
        )
        for tid, queues in selectors.queues_of(reachable_tenants(tenants)).run_sync().items()
        for queue in queues
    ]
    rates = None
    if with_rates:
        rates = {f"{tid}:{command}": rate for (tid, command), rate in charts.queue_rates(tenants, now).items()}
    return Overview(queues=displayed_queues, checks=run_checks(request, now), is_partial=is_partial, rates=rates)


def run_checks(request: HttpRequest, now: datetime) -> list[DisplayedCheck]:
    """Run the health checks that the user may see."""
    is_superuser = scoping.is_active_superuser(request.user)
    periodic_tasks_url = reverse("admin:queues_periodictaskrun_changelist") if is_superuser else ""
    checks = [(health_checks.beat(now), periodic_tasks_url), (health_checks.audit(), periodic_tasks_url)]
    if is_superuser:
        checks.append((health_checks.quarantine(), reverse("admin:queues_quarantine_changelist")))
    checks.append((check_deliveries(request, now), reverse("admin:webhooks_delivery_changelist")))
    store_checks = health_checks.redis_servers()
    # Tenants see whether tasks are durable (the second check), but not the installation's memory and servers.
    checks += [(check, "") for check in (store_checks if is_superuser else store_checks[1:2])]
    return [
        DisplayedCheck(name=check.name, is_well=check.is_well, message=check.message, url=url) for check, url in checks
    ]


def check_deliveries(request: HttpRequest, now: datetime) -> Check:
    """Count the callbacks that are overdue and those given up within the last day."""
    rows = scoping.filter_visible(Delivery.objects.all(), request.user)
    overdue = rows.filter(status=Delivery.Status.PENDING, due_at__lt=now - OVERDUE_AFTER)[: COUNT_LIMIT + 1].count()
    given_up = rows.filter(status=Delivery.Status.GIVEN_UP, ended_at__gt=now - DAY)[: COUNT_LIMIT + 1].count()
    problems = [f"{_format_count(overdue)} overdue"] if overdue else []
    problems += [f"{_format_count(given_up)} given up in 24 h"] if given_up else []
    return Check(name="Deliveries", is_well=not problems, message=", ".join(problems) or "on time")


def _choose_tenants(visible: QuerySet[Tenant], now: datetime) -> tuple[dict[str, Tenant], bool]:
    """Return the tenants to show, and whether there are more."""
    tenants = list(visible.order_by("slug")[: MAX_TENANTS + 1])
    if len(tenants) <= MAX_TENANTS:
        return {tenant.tid: tenant for tenant in tenants}, False
    busiest = (
        QueueSample.objects.filter(at__gt=now - LOOKBACK, tenant__in=visible)
        .values("tenant")
        .annotate(tasks=Max(F("ready") + F("delayed") + F("in_progress") + F("dead")))
        .order_by("-tasks")
        .values_list("tenant", flat=True)[:MAX_TENANTS]
    )
    return {tenant.tid: tenant for tenant in visible.filter(tid__in=list(busiest))}, True


def _age_seconds(oldest_ms: int | None, now: datetime) -> float | None:
    return None if oldest_ms is None else max(0.0, now.timestamp() - oldest_ms / 1000)


def _format_count(count: int) -> str:
    return f"more than {COUNT_LIMIT:,}" if count > COUNT_LIMIT else f"{count:,}"
