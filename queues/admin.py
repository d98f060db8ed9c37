"""Admin pages of the audit, the quarantine, queue policies and periodic tasks."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin
from unfold.decorators import action, display

from core.admin.audit_reason import ReasonActionForm, reason_in
from core.admin.links import queue_url, task_url
from core.admin.mixins import QueueColumnMixin, ReadOnlyAdminMixin
from core.admin.text import error_summary
from queues.audit import drain
from queues.domain import Outcome, TaskStatus
from queues.models import Attempt, AuditedResult, PeriodicTaskRun, Quarantine, QueuePolicy
from tenants.scoping import TenantFilter, TenantScopedAdmin, is_active_superuser

MAX_PAYLOAD_CHARS = 64 * 2**10
STATUS_COLOURS = {
    TaskStatus.COMPLETED: "success", TaskStatus.FAILED: "danger", TaskStatus.CANCELLED: "warning",
    TaskStatus.PENDING: "info", "DEAD LETTER": "danger",
}  # fmt: skip
OUTCOME_COLOURS = {
    Outcome.COMPLETED: "success", Outcome.FAILED: "danger", Outcome.NACKED: "warning", Outcome.ABANDONED: "warning",
    Outcome.EXPIRED: "danger", Outcome.CANCELLED: "warning",
}  # fmt: skip


def payload_html(text: str) -> SafeString:
    """Return a payload as HTML. JSON is indented; its numbers keep their digits.

    The text is escaped, and truncated to `MAX_PAYLOAD_CHARS`.
    """
    try:
        shown = msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        shown = text
    rest = f"\n… {len(shown) - MAX_PAYLOAD_CHARS} more characters" if len(shown) > MAX_PAYLOAD_CHARS else ""
    return format_html(
        '<pre class="whitespace-pre-wrap break-all overflow-auto" style="max-height: 30rem">{}{}</pre>',
        shown[:MAX_PAYLOAD_CHARS],
        rest,
    )


class AuditAdmin(QueueColumnMixin, ReadOnlyAdminMixin, TenantScopedAdmin):
    """Base class of the audit's pages."""

    empty_message = "No task has ended yet. An ended task appears here after a second."
    list_select_related = ("tenant",)
    date_hierarchy = "ended_at"
    ordering = ("-ended_at",)
    search_fields = ("task_id",)
    search_help_text = "Full task id or worker name"

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        return (queryset.filter(self.matches(term)) if term else queryset), False

    def matches(self, term: str) -> Q:
        """Return the filter for a search term. Indexes cover it."""
        worker = Q(worker=term)
        try:
            return worker | Q(task_id=uuid.UUID(term))
        except ValueError:
            return worker

    @display(description="Task", ordering="task_id")
    def task(self, row: Any) -> SafeString:
        return format_html('<span class="cq-mono">{}</span>', row.task_id)

    @display(description="Task")
    def task_page(self, row: Any) -> SafeString:
        return format_html(
            '<a class="cq-more cq-mono" href="{}">{}</a>', task_url(row.tenant_id, row.task_id), row.task_id
        )

    @display(description="Status", label=STATUS_COLOURS, ordering="status")
    def status_label(self, row: Any) -> str:
        return str(row.status)

    @display(description="Outcome", label=OUTCOME_COLOURS, ordering="outcome")
    def outcome_label(self, row: Any) -> str:
        return str(row.outcome)

    @display(description="Tenant")
    def tenant_slug(self, row: Any) -> str:
        # The foreign key has no constraint: the tenant may have been deleted.
        return str(row.tenant or row.tenant_id)


@admin.register(AuditedResult)
class AuditedResultAdmin(AuditAdmin):
    list_display = (
        "task", "ended_at", "tenant_slug", "queue", "status_label", "all_attempts", "worker", "error_start",
    )  # fmt: skip
    list_filter = ("status", "is_dead", TenantFilter)
    readonly_fields = (
        "task_page", "queue", "status_label", "payload_shown", "result_shown", "artifacts_shown", "all_attempts",
        "failed_attempts",
    )  # fmt: skip
    fieldsets = (
        (None, {"fields": ("task_page", "tenant_slug", "queue", "priority", "status_label", "outcome", "error")}),
        ("Request and result", {"fields": ("payload_shown", "result_shown", "artifacts_shown", "webhook")}),
        ("Attempts", {"fields": ("worker", "all_attempts", "failed_attempts", "max_attempts")}),
        ("Times and trace", {"fields": ("created_at", "claimed_at", "ended_at", "trace_parent", "trace_state")}),
    )

    @display(description="Status", label=STATUS_COLOURS, ordering="status")
    def status_label(self, row: AuditedResult) -> str:
        return "DEAD LETTER" if row.is_dead else str(row.status)

    @display(description="Error")
    def error_start(self, row: AuditedResult) -> str:
        return error_summary(row.error, "")[:80]

    @display(description="Attempts", ordering="deliveries")
    def all_attempts(self, row: AuditedResult) -> int:
        return row.deliveries

    @display(description="Failed attempts")
    def failed_attempts(self, row: AuditedResult) -> int:
        return row.attempts

    @display(description="Payload")
    def payload_shown(self, row: AuditedResult) -> SafeString:
        return payload_html(row.payload)

    @display(description="Result")
    def result_shown(self, row: AuditedResult) -> SafeString:
        return payload_html(row.result)

    @display(description="Artifacts")
    def artifacts_shown(self, row: AuditedResult) -> SafeString:
        return payload_html(row.artifacts)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return (*self.readonly_fields, "tenant_slug")


@admin.register(Attempt)
class AttemptAdmin(AuditAdmin):
    list_display = (
        "task", "number", "ended_at", "tenant_slug", "queue", "outcome_label", "worker", "error_start",
    )  # fmt: skip
    list_filter = ("outcome", TenantFilter)
    readonly_fields = ("task_page", "tenant_slug", "queue")
    exclude = ("task_id", "tenant", "command")

    @display(description="Error")
    def error_start(self, row: Attempt) -> str:
        return error_summary(row.error, "")[:80]


@admin.register(QueuePolicy)
class QueuePolicyAdmin(QueueColumnMixin, ReadOnlyAdminMixin, TenantScopedAdmin):
    """A read-only list. A policy is changed on the page of its queue, which shows its effect."""

    empty_message = "No queue has a policy: the settings apply. Set a policy on the page of a queue."
    list_display = (
        "queue", "tenant", "max_attempts", "priorities", "max_consumers", "retention_seconds", "backoff",
        "dead_letter_topic", "version", "queue_page",
    )  # fmt: skip
    list_filter = (TenantFilter,)
    list_select_related = ("tenant",)
    search_fields = ("=command",)
    search_help_text = "Full name of a queue"
    ordering = ("tenant__slug", "command")
    readonly_fields = ("queue", "queue_page")
    exclude = ("command",)

    @display(description="Priorities")
    def priorities(self, row: QueuePolicy) -> str:
        return ", ".join(map(str, row.priority_tiers or ())) or "-"

    @display(description="Page")
    def queue_page(self, row: QueuePolicy) -> SafeString:
        return format_html(
            '<a class="text-primary-600 underline" href="{}">Open queue</a>', queue_url(row.tenant_id, row.command)
        )


class PlatformAdmin(ReadOnlyAdminMixin, ModelAdmin):
    """Base class of pages that only superusers see, because their rows belong to no tenant."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return is_active_superuser(request.user)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return is_active_superuser(request.user)


@admin.register(Quarantine)
class QuarantineAdmin(PlatformAdmin):
    """Entries that could not be stored.

    Only superusers see them, because the tenant of an entry may be unknown or wrong.
    """

    list_display = ("stream_id", "partition", "reason", "created_at")
    ordering = ("-created_at",)
    fields = ("partition", "stream_id", "reason", "created_at")
    readonly_fields = ("created_at",)
    actions = ("retry",)
    action_form = ReasonActionForm
    empty_message = "The quarantine is empty: every entry has been stored."

    @action(description="Retry storing the selected entries", permissions=["view"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Quarantine]) -> None:
        reason = reason_in(request)
        if not reason:
            self.message_user(
                request, "No entry was retried. Enter a reason; it is kept in the history.", messages.ERROR
            )
            return
        count = queryset.count()
        with transaction.atomic():
            stored = drain.retry(queryset)
            LogEntry.objects.create(
                user_id=request.user.pk or 0,
                content_type=ContentType.objects.get_for_model(Quarantine),
                object_repr=f"{count} entries",
                action_flag=CHANGE,
                change_message=f"Retried {count} quarantined entries, {stored} stored: {reason}",
            )
        self.message_user(
            request,
            f"Entries stored: {stored}. Still in quarantine: {count - stored}.",
            messages.SUCCESS if stored == count else messages.WARNING,
        )


@admin.register(PeriodicTaskRun)
class PeriodicTaskRunAdmin(PlatformAdmin):
    """The last run of every periodic task."""

    empty_message = (
        "No periodic task has run yet. Check that Celery beat and a worker are running and reach their broker."
    )
    list_display = ("name", "period", "ended_at", "duration", "outcome", "next_at", "runs", "failures", "error")
    ordering = ("name",)

    @display(description="Period", ordering="every_seconds")
    def period(self, row: PeriodicTaskRun) -> str:
        return f"{row.every_seconds:g}\N{NO-BREAK SPACE}s"

    @display(description="Duration")
    def duration(self, row: PeriodicTaskRun) -> str:
        return f"{row.duration_ms}\N{NO-BREAK SPACE}ms"

    @display(description="Next run")
    def next_at(self, row: PeriodicTaskRun) -> str:
        return f"{row.next_at:%H:%M:%S}"
