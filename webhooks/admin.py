"""Webhooks in the console: what was sent and what came back, to be replayed; endpoints in trouble; subscriptions."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import TabularInline
from unfold.decorators import action, display
from unfold.enums import ActionVariant
from unfold.widgets import UnfoldAdminSplitDateTimeWidget

from core.admin.audit_reason import ReasonActionForm, ReasonForm, reason_in
from core.admin.mixins import ReadOnlyAdminMixin
from tenants.models import Tenant
from tenants.scoping import Role, TenantFilter, TenantScopedAdmin, has_role, tenants_of
from webhooks import services
from webhooks.delivery_results import disable_endpoint
from webhooks.models import Circuit, Delivery, DeliveryAttempt, Endpoint, Subscription
from webhooks.sender import utc_now

STATUS_COLOURS = {"delivered": "success", "pending": "info", "given up": "danger", "held": "warning"}


class RecoverForm(ReasonForm):
    since = forms.SplitDateTimeField(
        widget=UnfoldAdminSplitDateTimeWidget,
        help_text="What it missed since then is sent. As 2026-10-01 and 14:30:00, UTC.",
    )


class AttemptInline(TabularInline):
    model = DeliveryAttempt
    fields = ("number", "started_at", "duration_ms", "status_code", "error", "answer")
    readonly_fields = fields
    ordering = ("-number",)
    max_num = 0
    can_delete = False
    show_change_link = False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return True  # whoever sees the delivery sees what came of it


@admin.register(Delivery)
class DeliveryAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    list_display = (
        "shown_id", "created_at", "tenant_slug", "command", "status_label", "address", "last_answer",
    )  # fmt: skip
    list_select_related = ("tenant",)
    list_filter = ("status", TenantFilter)
    date_hierarchy = "created_at"
    ordering = ("-created_at",)
    search_fields = ("id",)
    search_help_text = "A delivery's or a task's id, or an endpoint's address without its query, in full."
    exclude = ("reservation", "task_id")
    readonly_fields = ("task",)
    inlines = (AttemptInline,)
    actions = ("replay",)
    nothing = "No delivery yet. One is opened when a task that names a webhook has ended."
    action_form = ReasonActionForm

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            found = Q(pk=uuid.UUID(term)) | Q(task_id=uuid.UUID(term))
        except ValueError:
            # An index knows addresses by their tenant.
            found = Q(tenant__in=tenants_of(request.user).values("pk"), address=term)
        return queryset.filter(found), False

    @display(description="Id", ordering="pk")
    def shown_id(self, row: Delivery) -> SafeString:
        return format_html('<span class="cq-mono">{}</span>', row.pk)

    @display(description="Task")
    def task(self, row: Delivery) -> SafeString:
        query = urlencode({"tenant": row.tenant_id, "id": row.task_id})
        return format_html(
            '<a class="cq-more cq-mono" href="{}?{}">{}</a>', reverse("console:task"), query, row.task_id
        )

    @display(description="Tenant")
    def tenant_slug(self, row: Delivery) -> str:
        return str(row.tenant or row.tenant_id)

    @display(description="Status", label=STATUS_COLOURS, ordering="status")
    def status_label(self, row: Delivery) -> str:
        return row.status

    @display(description="Last answer")
    def last_answer(self, row: Delivery) -> str:
        return " ".join(str(each) for each in (row.last_status, row.last_error[:80]) if each)

    def has_replay_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), Role.OPERATOR)

    @action(description="Send again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> None:
        reason = reason_in(request)
        if not reason:
            self.message_user(request, "Nothing was sent: give a reason.", messages.ERROR)
            return
        # Seeing a tenant is not yet acting for it: rows of tenants where one only looks are left out.
        tids = set(queryset.order_by().values_list("tenant_id", flat=True).distinct())
        allowed = {tid for tid in tids if has_role(request.user, tid, Role.OPERATOR)}
        with transaction.atomic():
            asked, sent = queryset.count(), 0
            for tenant in Tenant.objects.filter(pk__in=allowed):
                count = services.replay(queryset.filter(tenant_id=tenant.pk), utc_now())
                _log(request, tenant, f"Sent {count} deliveries again: {reason}")
                sent += count
        skipped = f", {asked - sent} skipped: under way, refused, or not yours to send" if asked > sent else ""
        self.message_user(request, f"{sent} will be sent again{skipped}.", messages.SUCCESS)


@admin.register(Endpoint)
class EndpointAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    nothing = "No endpoint has failed for longer than its first few tries."
    list_display = ("address", "tenant", "enabled", "disabled_because", "failing_since", "has_secret")
    list_select_related = ("tenant",)
    list_filter = ("is_enabled", TenantFilter)
    search_fields = ("address",)
    ordering = ("-failing_since",)
    fields = (
        "tenant", "address", "description", "is_enabled", "disabled_because", "disabled_at", "failing_since",
        "has_secret", "created_at",
    )  # fmt: skip
    readonly_fields = fields
    actions = None
    actions_detail = ("recover", "stop", "new_secret")

    @display(description="Enabled", boolean=True)
    def enabled(self, row: Endpoint) -> bool:
        return row.is_enabled

    @display(description="Signed with")
    def has_secret(self, row: Endpoint) -> str:
        return "its own secret" if row.sealed else "the tenant's secret"

    def has_operate_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), Role.OPERATOR)

    def has_secrets_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), Role.ADMIN)

    @action(
        description="Enable and recover", url_path="recover", icon="play_arrow", permissions=["operate"],
        dialog={
            "title": "Enable and recover",
            "description": "The endpoint is called again, and what it did not take since then is sent.",
            "form_class": RecoverForm, "form_submit_text": "Recover",
        },
    )  # fmt: skip
    def recover(self, request: HttpRequest, form: RecoverForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            endpoint = Endpoint.objects.select_for_update().get(pk=object_id)
            count = services.recover(endpoint, form.cleaned_data["since"], utc_now())
            since = form.cleaned_data["since"].isoformat(timespec="seconds")
            self.log_change(request, endpoint, f"Recovered since {since}, {count} sent: {form.cleaned_data['reason']}")
        return self._done(request, endpoint, f"{endpoint} is called again; {count} will be sent.")

    @action(
        description="Disable", url_path="disable", icon="block", permissions=["operate"], variant=ActionVariant.DANGER,
        dialog={
            "title": "Disable", "description": "It is called no more; its deliveries are held until it is enabled.",
            "form_class": ReasonForm, "form_submit_text": "Disable",
        },
    )  # fmt: skip
    def stop(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            endpoint = Endpoint.objects.get(pk=object_id)
            held = disable_endpoint(endpoint.tenant_id, endpoint.address, form.cleaned_data["reason"], utc_now())
            self.log_change(request, endpoint, f"Disabled, {held} held: {form.cleaned_data['reason']}")
        return self._done(request, endpoint, f"{endpoint} is disabled; {held} deliveries are held.")

    @action(
        description="New secret", url_path="new-secret", icon="key", permissions=["secrets"],
        dialog={
            "title": "New secret of its own",
            "description": "It is shown once and signs in place of the tenant's; a present one signs on for a day.",
            "form_class": ReasonForm, "form_submit_text": "Make it",
        },
    )  # fmt: skip
    def new_secret(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            endpoint = Endpoint.objects.get(pk=object_id)
            secret = services.rotate(endpoint, utc_now())
            self.log_change(request, endpoint, f"New secret: {form.cleaned_data['reason']}")
        # In the answer to this one request, and not as a message: those are kept in a cookie or the session.
        answer = HttpResponse(
            format_html(
                '<div id="dialog-form" class="my-6"><p class="mb-2">Copy it now, it is not shown again:</p>'
                '<code class="break-all select-all">{}</code></div>',
                secret,
            )
        )
        answer["Cache-Control"] = "no-store"
        return answer

    def _done(self, request: HttpRequest, endpoint: Endpoint, text: str) -> HttpResponse:
        messages.success(request, text)
        return HttpResponse(headers={"HX-Redirect": reverse("admin:webhooks_endpoint_change", args=[endpoint.pk])})


@admin.register(Subscription)
class SubscriptionAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    nothing = "No worker has asked to be told of new work. They poll."
    list_display = ("worker", "tenant", "mode", "group", "callback_url", "expires_at", "notified", "last_status")
    list_select_related = ("tenant",)
    list_filter = ("mode", TenantFilter)
    search_fields = ("worker",)
    ordering = ("-expires_at",)
    fields = (
        "id", "tenant", "worker", "callback_url", "event_types", "mode", "group", "ttl_seconds",
        "min_interval_seconds", "expires_at", "created_at", "notified_at", "notified", "last_status", "last_error",
    )  # fmt: skip
    readonly_fields = fields


@admin.register(Circuit)
class CircuitAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    """Hosts that fail: how often in a row, and until when they are left alone."""

    nothing = "No host fails."
    list_display = ("host", "tenant", "failures", "paused_until", "updated_at")
    list_select_related = ("tenant",)
    list_filter = (TenantFilter,)
    ordering = ("-failures",)


def _log(request: HttpRequest, tenant: Tenant, message: str) -> None:
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(Tenant),
        object_id=tenant.pk,
        object_repr=tenant.slug[:200],
        action_flag=CHANGE,
        change_message=message,
    )
