"""Admin pages of deliveries, endpoints, subscriptions and circuits."""

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
from core.admin.mixins import QueueColumnMixin, ReadOnlyAdminMixin
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
        help_text="In UTC, for example 2026-10-01 and 14:30:00. Deliveries missed since this time are sent.",
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
        return True  # a user who may see the delivery may see its attempts


@admin.register(Delivery)
class DeliveryAdmin(QueueColumnMixin, ReadOnlyAdminMixin, TenantScopedAdmin):
    list_display = (
        "shown_id", "created_at", "tenant_slug", "queue", "status_label", "address", "last_response",
    )  # fmt: skip
    list_select_related = ("tenant",)
    list_filter = ("status", TenantFilter)
    date_hierarchy = "created_at"
    ordering = ("-created_at",)
    search_fields = ("id",)
    search_help_text = "Full task id, delivery id or address"
    exclude = ("reservation", "task_id", "command")
    readonly_fields = ("task", "queue")
    inlines = (AttemptInline,)
    actions = ("replay",)
    empty_message = "No deliveries yet. A delivery is created when a task with a webhook ends."
    action_form = ReasonActionForm

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            condition = Q(pk=uuid.UUID(term)) | Q(task_id=uuid.UUID(term))
        except ValueError:
            # The index of addresses starts with the tenant.
            condition = Q(tenant__in=tenants_of(request.user).values("pk"), address=term)
        return queryset.filter(condition), False

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

    @display(description="Last response")
    def last_response(self, row: Delivery) -> str:
        return " ".join(str(part) for part in (row.last_status, row.last_error[:80]) if part)

    def has_replay_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), Role.OPERATOR)

    @action(description="Send again", permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> None:
        reason = reason_in(request)
        if not reason:
            self.message_user(request, "Nothing was sent. Enter a reason; it is kept in the history.", messages.ERROR)
            return
        # The list also has rows of tenants for which the user is only a viewer. Do not replay those.
        tids = set(queryset.order_by().values_list("tenant_id", flat=True).distinct())
        allowed = {tid for tid in tids if has_role(request.user, tid, Role.OPERATOR)}
        with transaction.atomic():
            selected, sent = queryset.count(), 0
            for tenant in Tenant.objects.filter(pk__in=allowed):
                count = services.replay(queryset.filter(tenant_id=tenant.pk), utc_now())
                _log_change(request, tenant, f"Sent {count} deliveries again: {reason}")
                sent += count
        skipped = f" Skipped, because pending, refused or not permitted: {selected - sent}." if selected > sent else ""
        self.message_user(request, f"Deliveries to be sent again: {sent}.{skipped}", messages.SUCCESS)


@admin.register(Endpoint)
class EndpointAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    empty_message = "No endpoints. An endpoint is listed if it has its own secret, fails or is disabled."
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
        return "its own secret" if row.encrypted_secret else "the tenant's secret"

    def has_operate_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), Role.OPERATOR)

    def has_secrets_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), Role.ADMIN)

    @action(
        description="Enable and recover", url_path="recover", icon="play_arrow", permissions=["operate"],
        dialog={
            "title": "Enable and recover endpoint",
            "description": "The endpoint receives callbacks again. Deliveries missed since the given time are sent.",
            "form_class": RecoverForm, "form_submit_text": "Recover",
        },
    )  # fmt: skip
    def recover(self, request: HttpRequest, form: RecoverForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            endpoint = Endpoint.objects.select_for_update().get(pk=object_id)
            count = services.recover(endpoint, form.cleaned_data["since"], utc_now())
            since = form.cleaned_data["since"].isoformat(timespec="seconds")
            self.log_change(request, endpoint, f"Recovered since {since}, {count} sent: {form.cleaned_data['reason']}")
        return self._redirect(request, endpoint, f"{endpoint} is enabled. Deliveries to be sent: {count}.")

    @action(
        description="Disable", url_path="disable", icon="block", permissions=["operate"], variant=ActionVariant.DANGER,
        dialog={
            "title": "Disable endpoint",
            "description": "Nothing is sent to the endpoint. Its deliveries are held until it is enabled.",
            "form_class": ReasonForm, "form_submit_text": "Disable",
        },
    )  # fmt: skip
    def stop(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            endpoint = Endpoint.objects.get(pk=object_id)
            held = disable_endpoint(endpoint.tenant_id, endpoint.address, form.cleaned_data["reason"], utc_now())
            self.log_change(request, endpoint, f"Disabled, {held} held: {form.cleaned_data['reason']}")
        return self._redirect(request, endpoint, f"{endpoint} is disabled. Deliveries held: {held}.")

    @action(
        description="Create secret", url_path="new-secret", icon="key", permissions=["secrets"],
        dialog={
            "title": "Create endpoint secret",
            "description": "The secret is shown once. It replaces the tenant's secret for this endpoint. A former "
            "secret of the endpoint also signs for another 24 hours.",
            "form_class": ReasonForm, "form_submit_text": "Create secret",
        },
    )  # fmt: skip
    def new_secret(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            endpoint = Endpoint.objects.get(pk=object_id)
            secret = services.rotate(endpoint, utc_now())
            self.log_change(request, endpoint, f"New secret: {form.cleaned_data['reason']}")
        # Not as a message: Django stores messages in a cookie or the session.
        response = HttpResponse(
            format_html(
                '<div id="dialog-form" class="my-6"><p class="mb-2">Copy the secret now. It is not shown again.</p>'
                '<code class="break-all select-all">{}</code></div>',
                secret,
            )
        )
        response["Cache-Control"] = "no-store"
        return response

    def _redirect(self, request: HttpRequest, endpoint: Endpoint, text: str) -> HttpResponse:
        messages.success(request, text)
        return HttpResponse(headers={"HX-Redirect": reverse("admin:webhooks_endpoint_change", args=[endpoint.pk])})


@admin.register(Subscription)
class SubscriptionAdmin(ReadOnlyAdminMixin, TenantScopedAdmin):
    empty_message = "No subscriptions. Workers learn of new tasks by polling."
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
    """Failing hosts, their consecutive failures, and the time until which they are paused."""

    empty_message = "No failing hosts."
    list_display = ("host", "tenant", "failures", "paused_until", "updated_at")
    list_select_related = ("tenant",)
    list_filter = (TenantFilter,)
    ordering = ("-failures",)


def _log_change(request: HttpRequest, tenant: Tenant, message: str) -> None:
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(Tenant),
        object_id=tenant.pk,
        object_repr=tenant.slug[:200],
        action_flag=CHANGE,
        change_message=message,
    )
