"""Django's own tables in the console: people, their groups, and what operators did."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, User
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from tenants import scoping
from tenants.models import Tenant, TenantMembership

admin.site.unregister(User)
admin.site.unregister(Group)


class SuperusersOnly(ModelAdmin):
    """Who may log in, and as what, is decided by those who run the platform."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        return scoping.is_unlimited(request.user)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.is_unlimited(request.user)

    has_add_permission = has_module_permission
    has_change_permission = has_view_permission
    has_delete_permission = has_view_permission


class MembershipInline(TabularInline):
    model = TenantMembership
    autocomplete_fields = ("tenant",)
    extra = 0
    tab = True


@admin.register(User)
class UserAdmin(SuperusersOnly, DjangoUserAdmin):  # type: ignore[type-arg]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "email", "is_active", "is_staff", "is_superuser", "last_login")
    inlines = (MembershipInline,)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # With the person would go the record of what they did; they are made inactive instead.
        return False


@admin.register(Group)
class GroupAdmin(SuperusersOnly, DjangoGroupAdmin):
    pass


@admin.register(LogEntry)
class LogEntryAdmin(ModelAdmin):
    """What was done, by whom and why. Staff see what was done to the tenants of their memberships."""

    list_display = ("action_time", "user", "what", "object_repr", "content_type")
    list_display_links = ("what",)
    list_select_related = ("user", "content_type")
    search_fields = ("user__username", "object_repr", "change_message")
    search_help_text = "A person, a tenant, or words of what was done and why."
    date_hierarchy = "action_time"
    ordering = ("-action_time",)
    list_per_page = 50
    show_full_result_count = False
    fields = ("action_time", "user", "what", "object_repr", "content_type")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[LogEntry]:
        rows: QuerySet[LogEntry] = super().get_queryset(request)
        tids = scoping.tids_of(request.user)
        if tids is None:
            return rows
        meta = Tenant._meta
        return rows.filter(
            content_type__app_label=meta.app_label, content_type__model=meta.model_name, object_id__in=tids
        )  # fmt: skip

    @display(description="What was done, and why")
    def what(self, entry: LogEntry) -> str:
        return entry.get_change_message() or entry.get_action_flag_display()

    def has_module_permission(self, request: HttpRequest) -> bool:
        return scoping.may(request.user, None)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.may(request.user, None)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
