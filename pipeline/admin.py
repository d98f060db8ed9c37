"""The admin pages of pipeline runs and marts.

They are read-only, because only the pipeline writes these rows.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.decorators import display

from core.admin.mixins import QueueColumnMixin, ReadOnlyAdminMixin
from pipeline.models import (
    Capacity,
    Failure,
    Latency,
    LeaseAdvice,
    RunLog,
    Throughput,
    Usage,
    WebhookHealth,
)
from tenants.models import Tenant
from tenants.scoping import TenantFilter, TenantScopedAdmin, is_active_superuser

STATE_COLOURS = {
    RunLog.JobState.SUCCEEDED: "success", RunLog.JobState.RUNNING: "info", RunLog.JobState.FAILED: "danger",
}  # fmt: skip


@admin.register(RunLog)
class RunLogAdmin(ReadOnlyAdminMixin, ModelAdmin):
    """Pipeline runs, for superusers only: the numbers are sums over all tenants."""

    list_display = (
        "started_at", "job", "state_label", "stage", "seconds", "rows_in", "rows_out", "quarantined", "late_dropped",
        "partitions",
    )  # fmt: skip
    list_filter = ("state", "job")
    date_hierarchy = "started_at"
    ordering = ("-started_at",)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return is_active_superuser(request.user)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return is_active_superuser(request.user)

    @display(description="State", label=STATE_COLOURS, ordering="state")
    def state_label(self, row: RunLog) -> str:
        return str(row.state)


class MartAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    empty_message = (
        "No history yet. A periodic task runs the pipeline every hour. To run it now: python manage.py pipeline run"
    )
    list_filter = (TenantFilter,)
    date_hierarchy = "date"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # A join would hide the history of a deleted tenant.
        slug = Tenant.objects.filter(pk=OuterRef("tenant_id")).values("slug")
        rows: QuerySet[Any] = super().get_queryset(request).annotate(slug=Subquery(slug))
        return rows

    @display(description="Tenant")
    def tenant_slug(self, row: Any) -> str:
        return str(row.slug or row.tenant_id)


class QueueMartAdmin(QueueColumnMixin, MartAdmin):
    search_fields = ("command__startswith",)
    search_help_text = "Beginning of a queue's name"
    exclude = ("command",)
    readonly_fields = ("queue",)


@admin.register(Throughput)
class ThroughputAdmin(QueueMartAdmin):
    ordering = ("-date", "-hour")
    list_display = (
        "hour", "tenant_slug", "queue", "attempts", "completed", "failed", "nacked", "abandoned", "expired",
        "cancelled", "retries", "ended", "dead",
    )  # fmt: skip


@admin.register(Latency)
class LatencyAdmin(QueueMartAdmin):
    ordering = ("-date", "-hour")
    list_display = (
        "hour", "tenant_slug", "queue", "attempts", "wait_p50_ms", "wait_p95_ms", "wait_p99_ms", "wait_max_ms",
        "run_p50_ms", "run_p95_ms", "run_p99_ms", "run_max_ms",
    )  # fmt: skip


@admin.register(Failure)
class FailureAdmin(QueueMartAdmin):
    ordering = ("-date", "-attempts")
    list_display = ("date", "tenant_slug", "fingerprint", "attempts", "dead", "first_at", "last_at", "example")


@admin.register(Usage)
class UsageAdmin(MartAdmin):
    list_display = (
        "date", "tenant_slug", "tasks", "attempts", "compute_ms", "payload_bytes", "result_bytes", "delivered_bytes",
    )  # fmt: skip


@admin.register(Capacity)
class CapacityAdmin(QueueMartAdmin):
    ordering = ("-date", "-hour")
    list_display = (
        "hour", "tenant_slug", "queue", "arrivals", "service_mean_ms", "load", "wait_mean_ms", "workers_1s",
        "workers_10s", "workers_60s",
    )  # fmt: skip


@admin.register(LeaseAdvice)
class LeaseAdviceAdmin(QueueMartAdmin):
    list_display = (
        "date", "tenant_slug", "queue", "attempts", "expired", "run_p50_ms", "run_p99_ms", "duplicate_ms",
        "lease_advice_seconds", "max_attempts_advice",
    )  # fmt: skip


@admin.register(WebhookHealth)
class WebhookHealthAdmin(MartAdmin):
    ordering = ("-date", "-hour")
    search_fields = ("endpoint__startswith",)
    search_help_text = "Beginning of an endpoint address"
    list_display = (
        "hour", "tenant_slug", "endpoint", "attempts", "delivered", "refused", "unreachable", "latency_p50_ms",
        "latency_p95_ms", "latency_p99_ms",
    )  # fmt: skip
