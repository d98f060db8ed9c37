"""Tenants in the console: limits and suspension for superusers, issuers and secrets for a tenant's own admins."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db import transaction
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from unfold.decorators import action, display
from unfold.enums import ActionVariant

from core.admin.audit_reason import ReasonForm
from core.admin.fields import JwksField
from tenants import scoping, services
from tenants.models import SigningSecret, Tenant, TenantIssuer, TenantMembership
from tenants.scoping import Role, TenantFilter, TenantScopedAdmin


def dialog(title: str, description: str, submit: str) -> dict[str, Any]:
    return {
        "title": title, "description": description, "form_class": ReasonForm, "form_submit_text": submit,
    }  # fmt: skip


@admin.register(Tenant)
class TenantAdmin(TenantScopedAdmin):
    show_full_result_count = True  # there are not so many
    tenant_path = "pk"
    change_role = None
    list_display = ("slug", "name", "status_label", "tid", "created_at")
    list_filter = ("status",)
    search_fields = ("slug", "name", "=tid")
    search_help_text = "A tenant's name, or its id in full."
    readonly_fields = ("tid", "status", "created_at", "updated_at")
    actions = None
    actions_detail = ("suspend", "resume", "rotate_secret")
    fieldsets = (
        (None, {"fields": ("slug", "name", "status", "tid")}),
        ("Limits (empty: the installation's)", {"fields": (
            "payload_bytes", "result_bytes", "depth",
            "create_per_second", "claim_per_second", "admin_per_second", "webhook_per_second",
        )}),
        ("Retention and strictness", {"fields": (
            "retention_seconds", "dead_retention_seconds", "is_idempotency_strict", "is_lease_token_required",
        )}),
        ("Record", {"fields": ("created_at", "updated_at")}),
    )  # fmt: skip

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if isinstance(field, forms.NullBooleanField):
            field.label = str(db_field.verbose_name).removeprefix("is ").capitalize()
            (nothing, _), *others = field.widget.choices
            field.widget.choices = [(nothing, "as the installation says"), *others]
        return field

    @display(description="Status", label={"active": "success", "suspended": "danger"}, ordering="status")
    def status_label(self, tenant: Tenant) -> str:
        return tenant.status

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # a tenant is suspended; deleting the row would strand its tasks and its audit

    def save_model(self, request: HttpRequest, obj: Tenant, form: ModelForm[Tenant], change: bool) -> None:
        if change:
            # Only what was edited: a suspension made while the form was being sent must not be undone by it.
            obj.save(update_fields=[*form.changed_data, "updated_at"])
        else:
            super().save_model(request, obj, form, change)

    def has_suspend_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        tid = self.tid_of(obj)
        is_active = Tenant.objects.filter(pk=tid, status=Tenant.Status.ACTIVE).exists()
        return scoping.is_unlimited(request.user) and is_active

    def has_resume_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        tid = self.tid_of(obj)
        is_suspended = Tenant.objects.filter(pk=tid, status=Tenant.Status.SUSPENDED).exists()
        return scoping.is_unlimited(request.user) and is_suspended

    def has_secrets_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.has_role(request.user, self.tid_of(obj), Role.ADMIN)

    @action(
        description="Suspend", url_path="suspend", icon="block", permissions=["suspend"], variant=ActionVariant.DANGER,
        dialog=dialog("Suspend", "New work is refused at once; what workers have claimed they may finish.", "Suspend"),
    )  # fmt: skip
    def suspend(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            tenant = services.suspend(Tenant.objects.get(pk=object_id).slug)
            self.log_change(request, tenant, f"Suspended: {form.cleaned_data['reason']}")
        return self._done(request, tenant, f"{tenant} is suspended.")

    @action(
        description="Resume", url_path="resume", icon="play_arrow", permissions=["resume"],
        dialog=dialog("Resume", "The tenant's new work is accepted again.", "Resume"),
    )  # fmt: skip
    def resume(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            tenant = services.resume(Tenant.objects.get(pk=object_id).slug)
            self.log_change(request, tenant, f"Resumed: {form.cleaned_data['reason']}")
        return self._done(request, tenant, f"{tenant} is active.")

    @action(
        description="New signing secret", url_path="rotate-secret", icon="key", permissions=["secrets"],
        dialog=dialog(
            "New signing secret",
            "It is shown once. The present secret signs beside it for 24 hours; any older one ends now.",
            "Make it",
        ),
    )  # fmt: skip
    def rotate_secret(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            tenant = Tenant.objects.get(pk=object_id)
            row = services.rotate_signing_secret(tenant.slug)
            self.log_change(request, tenant, f"New signing secret {row}: {form.cleaned_data['reason']}")
        # In the answer to this one request, and not as a message: those are kept in a cookie or the session.
        answer = HttpResponse(
            format_html(
                '<div id="dialog-form" class="my-6"><p class="mb-2">Copy it now, it is not shown again:</p>'
                '<code class="break-all select-all">{}</code></div>',
                row.reveal(),
            )
        )
        answer["Cache-Control"] = "no-store"
        return answer

    def _done(self, request: HttpRequest, tenant: Tenant, text: str) -> HttpResponse:
        messages.success(request, text)
        return HttpResponse(headers={"HX-Redirect": reverse("admin:tenants_tenant_change", args=[tenant.pk])})


@admin.register(TenantMembership)
class TenantMembershipAdmin(TenantScopedAdmin):
    show_full_result_count = True  # there are not so many
    change_role = None
    list_display = ("user", "tenant", "role", "created_at")
    list_filter = (TenantFilter, "role")
    list_select_related = ("user", "tenant")
    search_fields = ("user__username", "tenant__slug")
    autocomplete_fields = ("user", "tenant")

    def get_queryset(self, request: HttpRequest) -> QuerySet[TenantMembership]:
        return super().get_queryset(request).select_related("user", "tenant")  # its name is made of theirs


@admin.register(TenantIssuer)
class TenantIssuerAdmin(TenantScopedAdmin):
    show_full_result_count = True  # there are not so many
    list_display = ("issuer", "tenant", "jwks_url")
    list_filter = (TenantFilter,)
    list_select_related = ("tenant",)
    search_fields = ("issuer", "tenant__slug")
    fields = ("tenant", "issuer", "jwks", "jwks_url", "producer_audience", "worker_audience")

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.name == "jwks":
            kwargs["form_class"] = JwksField
        return super().formfield_for_dbfield(db_field, request, **kwargs)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        # The servers fetch that URL from inside the network, so only the operator of the network may name it.
        return () if scoping.is_unlimited(request.user) else ("jwks_url",)


@admin.register(SigningSecret)
class SigningSecretAdmin(TenantScopedAdmin):
    """The secrets in force, masked. New ones are made on the tenant's page."""

    show_full_result_count = True
    view_role = Role.ADMIN
    list_display = ("masked", "tenant", "created_at", "retires_at", "active")
    list_filter = (TenantFilter,)
    list_select_related = ("tenant",)
    search_fields = ("tenant__slug",)
    fields = ("tenant", "masked", "created_at", "retires_at")
    readonly_fields = fields
    actions = None

    @display(description="Secret")
    def masked(self, secret: SigningSecret) -> str:
        return str(secret)

    @display(description="In force", boolean=True)
    def active(self, secret: SigningSecret) -> bool:
        return secret.is_active

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
