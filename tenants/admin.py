"""Admin pages of tenants, memberships, token issuers and signing secrets.

Superusers set limits and suspend tenants. A tenant's own administrators manage its issuers and its secrets.
"""

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


def reason_dialog(title: str, description: str, submit: str) -> dict[str, Any]:
    """Return the dialog of an action that asks for a reason."""
    return {
        "title": title, "description": description, "form_class": ReasonForm, "form_submit_text": submit,
    }  # fmt: skip


@admin.register(Tenant)
class TenantAdmin(TenantScopedAdmin):
    show_full_result_count = True  # the table is small
    tenant_path = "pk"
    change_role = None
    list_display = ("slug", "name", "status_label", "tid", "created_at")
    list_filter = ("status",)
    search_fields = ("slug", "name", "=tid")
    search_help_text = "Name or full id"
    readonly_fields = ("tid", "status", "created_at", "updated_at")
    actions = None
    actions_detail = ("suspend", "resume", "rotate_secret")
    fieldsets = (
        (None, {"fields": ("slug", "name", "status", "tid")}),
        ("Limits (empty: installation default)", {"fields": (
            "payload_bytes", "result_bytes", "depth",
            "create_per_second", "claim_per_second", "admin_per_second", "webhook_per_second",
        )}),
        ("Retention and strictness", {"fields": (
            "retention_seconds", "dead_retention_seconds", "is_idempotency_strict", "is_lease_token_required",
        )}),
        ("Dates", {"fields": ("created_at", "updated_at")}),
    )  # fmt: skip

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if isinstance(field, forms.NullBooleanField):
            field.label = str(db_field.verbose_name).removeprefix("is ").capitalize()
            (empty, _), *others = field.widget.choices
            field.widget.choices = [(empty, "installation default"), *others]
        return field

    @display(description="Status", label={"active": "success", "suspended": "danger"}, ordering="status")
    def status_label(self, tenant: Tenant) -> str:
        return tenant.status

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # suspend the tenant instead: deleting the row would orphan its tasks and its audit

    def save_model(self, request: HttpRequest, obj: Tenant, form: ModelForm[Tenant], change: bool) -> None:
        if change:
            # Save only the edited fields. Saving all of them would write the status that this request read, and undo a
            # suspension committed since.
            obj.save(update_fields=[*form.changed_data, "updated_at"])
        else:
            super().save_model(request, obj, form, change)

    def has_suspend_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        tid = self.tid_of(obj)
        is_active = Tenant.objects.filter(pk=tid, status=Tenant.Status.ACTIVE).exists()
        return scoping.is_active_superuser(request.user) and is_active

    def has_resume_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        tid = self.tid_of(obj)
        is_suspended = Tenant.objects.filter(pk=tid, status=Tenant.Status.SUSPENDED).exists()
        return scoping.is_active_superuser(request.user) and is_suspended

    def has_secrets_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.has_role(request.user, self.tid_of(obj), Role.ADMIN)

    @action(
        description="Suspend tenant", url_path="suspend", icon="block", permissions=["suspend"],
        variant=ActionVariant.DANGER,
        dialog=reason_dialog(
            "Suspend tenant", "New tasks are refused at once. Workers can still finish the tasks they have claimed.",
            "Suspend tenant",
        ),
    )  # fmt: skip
    def suspend(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            tenant = services.suspend(Tenant.objects.get(pk=object_id).slug)
            self.log_change(request, tenant, f"Suspended: {form.cleaned_data['reason']}")
        return self._redirect(request, tenant, f"{tenant} is suspended.")

    @action(
        description="Resume tenant", url_path="resume", icon="play_arrow", permissions=["resume"],
        dialog=reason_dialog("Resume tenant", "The tenant can create and claim tasks again.", "Resume tenant"),
    )  # fmt: skip
    def resume(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            tenant = services.resume(Tenant.objects.get(pk=object_id).slug)
            self.log_change(request, tenant, f"Resumed: {form.cleaned_data['reason']}")
        return self._redirect(request, tenant, f"{tenant} is active.")

    @action(
        description="Create signing secret", url_path="rotate-secret", icon="key", permissions=["secrets"],
        dialog=reason_dialog(
            "Create signing secret",
            "The secret is shown once. The current secret also signs for another 24 hours. Older secrets stop at once.",
            "Create secret",
        ),
    )  # fmt: skip
    def rotate_secret(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        with transaction.atomic():
            tenant = Tenant.objects.get(pk=object_id)
            row = services.rotate_signing_secret(tenant.slug)
            self.log_change(request, tenant, f"New signing secret {row}: {form.cleaned_data['reason']}")
        # Do not use Django's messages, which are stored in a cookie or the session.
        response = HttpResponse(
            format_html(
                '<div id="dialog-form" class="my-6"><p class="mb-2">Copy the secret now. It is not shown again.</p>'
                '<code class="break-all select-all">{}</code></div>',
                row.reveal(),
            )
        )
        response["Cache-Control"] = "no-store"
        return response

    def _redirect(self, request: HttpRequest, tenant: Tenant, text: str) -> HttpResponse:
        messages.success(request, text)
        return HttpResponse(headers={"HX-Redirect": reverse("admin:tenants_tenant_change", args=[tenant.pk])})


@admin.register(TenantMembership)
class TenantMembershipAdmin(TenantScopedAdmin):
    show_full_result_count = True  # the table is small
    change_role = None
    list_display = ("user", "tenant", "role", "created_at")
    list_filter = (TenantFilter, "role")
    list_select_related = ("user", "tenant")
    search_fields = ("user__username", "tenant__slug")
    autocomplete_fields = ("user", "tenant")

    def get_queryset(self, request: HttpRequest) -> QuerySet[TenantMembership]:
        return super().get_queryset(request).select_related("user", "tenant")  # for __str__


@admin.register(TenantIssuer)
class TenantIssuerAdmin(TenantScopedAdmin):
    show_full_result_count = True  # the table is small
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
        # The servers fetch this URL from inside the network, so only superusers may set it.
        return () if scoping.is_active_superuser(request.user) else ("jwks_url",)


@admin.register(SigningSecret)
class SigningSecretAdmin(TenantScopedAdmin):
    """Signing secrets, masked. New secrets are created on the tenant's page."""

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

    @display(description="Active", boolean=True)
    def active(self, secret: SigningSecret) -> bool:
        return secret.is_active

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
