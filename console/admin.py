"""Admin pages of Django's own tables: users and the log of operator actions."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, User
from django.contrib.contenttypes.models import ContentType
from django.db.models import CharField, Count, Q, QuerySet
from django.db.models.functions import Cast
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from core.admin.audit_reason import SaveReasonMixin
from core.admin.fields import SafeAutocomplete
from core.admin.mixins import ReadOnlyAdminMixin
from tenants import scoping
from tenants.models import Tenant, TenantMembership

# Models whose log entries a tenant's staff may see, besides those of the tenant itself.
MODELS_OF_TENANTS = ("tenants.TenantIssuer", "tenants.TenantMembership", "webhooks.Endpoint", "queues.QueuePolicy")

admin.site.unregister(User)
# Permissions come from memberships alone, so a group would have no effect.
admin.site.unregister(Group)


class SuperusersOnly(SaveReasonMixin):
    """Let only superusers see and change the rows, and require a reason for each change."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        return scoping.is_active_superuser(request.user)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.is_active_superuser(request.user)

    has_add_permission = has_module_permission
    has_change_permission = has_view_permission
    has_delete_permission = has_view_permission


class MembershipInline(SafeAutocomplete, TabularInline):
    model = TenantMembership
    autocomplete_fields = ("tenant",)
    # A membership is deleted on its own page, which asks for a reason.
    can_delete = False
    show_change_link = True
    extra = 0
    # A forged form may request any number of rows. A page with thousands would occupy a thread for seconds.
    max_num = 200
    tab = True

    def get_formset(self, request: HttpRequest, obj: Any = None, **options: Any) -> Any:
        return super().get_formset(request, obj, **{"absolute_max": self.max_num, **options})

    def get_queryset(self, request: HttpRequest) -> QuerySet[TenantMembership]:
        rows: QuerySet[TenantMembership] = super().get_queryset(request)
        return rows.select_related("user", "tenant")  # shown in the name of a membership


@admin.register(User)
class UserAdmin(SuperusersOnly, DjangoUserAdmin):  # type: ignore[type-arg]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "email", "is_active", "is_staff", "access", "last_login")
    list_filter = ("is_staff", "is_superuser", "is_active")
    filter_horizontal = ()
    inlines = (MembershipInline,)
    add_fieldsets = DjangoUserAdmin.add_fieldsets  # the theme sets an empty tuple, which hides all fields
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Personal information", {"fields": ("first_name", "last_name", "email")}),
        ("Permissions", {"fields": ("is_active", "is_staff", "is_superuser")}),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("last_login", "date_joined")

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        rows: QuerySet[User] = super().get_queryset(request)
        return rows.annotate(memberships=Count("tenant_memberships"))

    @display(description="Access", label={"all tenants": "info"})
    def access(self, user: Any) -> str:
        if user.is_superuser:
            return "all tenants"
        return f"{user.memberships} tenant{'' if user.memberships == 1 else 's'}"

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # Deleting a user deletes the log of their actions. Users are deactivated instead.
        return False


@admin.register(LogEntry)
class LogEntryAdmin(scoping.AllowlistedFilters, ReadOnlyAdminMixin, ModelAdmin):
    """The log of actions with their reasons. Staff see the entries of their tenants."""

    list_display = ("time", "username", "action", "object_name", "object_type")
    list_select_related = ("user", "content_type")
    search_fields = ("user__username", "object_repr", "change_message")
    search_help_text = "User, tenant, or words of the action"
    date_hierarchy = "action_time"
    ordering = ("-action_time",)
    fields = ("time", "username", "action", "object_name", "object_type")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[LogEntry]:
        rows: QuerySet[LogEntry] = super().get_queryset(request)
        tids = scoping.tids_of(request.user)
        if tids is None:
            return rows
        visible = Q(content_type=ContentType.objects.get_for_model(Tenant), object_id__in=tids)
        for name in MODELS_OF_TENANTS:
            model = apps.get_model(name)
            ids = model._default_manager.filter(tenant__in=tids).annotate(text=Cast("pk", CharField())).values("text")
            visible |= Q(content_type=ContentType.objects.get_for_model(model), object_id__in=ids)
        return rows.filter(visible)

    @display(description="Time", ordering="action_time")
    def time(self, entry: LogEntry) -> str:
        return f"{entry.action_time:%Y-%m-%d %H:%M:%S}"

    @display(description="User", ordering="user__username")
    def username(self, entry: LogEntry) -> str:
        return entry.user.get_username()

    @display(description="Object")
    def object_name(self, entry: LogEntry) -> str:
        return entry.object_repr

    @display(description="Type")
    def object_type(self, entry: LogEntry) -> str:
        return str(entry.content_type.name) if entry.content_type else ""

    @display(description="Action and reason")
    def action(self, entry: LogEntry) -> str:
        return entry.get_change_message() or entry.get_action_flag_display()

    def has_module_permission(self, request: HttpRequest) -> bool:
        return scoping.has_role(request.user, None)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.has_role(request.user, None)
