"""Django's own tables in the console: people, their groups, and what operators did."""

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

from core.admin.audit_reason import SavedWithReason
from core.admin.fields import SafeAutocomplete
from core.admin.mixins import ReadOnlyAdminMixin
from tenants import scoping
from tenants.models import Tenant, TenantMembership

# Besides the tenant itself: what staff of a tenant may change, and is told of who did.
OF_TENANTS = ("tenants.TenantIssuer", "tenants.TenantMembership", "webhooks.Endpoint", "queues.QueuePolicy")

admin.site.unregister(User)
# What somebody may do comes from memberships alone: a group would promise what it does not give.
admin.site.unregister(Group)


class SuperusersOnly(SavedWithReason):
    """Who may log in, and as what, is decided by those who run the platform."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        return scoping.is_unlimited(request.user)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.is_unlimited(request.user)

    has_add_permission = has_module_permission
    has_change_permission = has_view_permission
    has_delete_permission = has_view_permission


class MembershipInline(SafeAutocomplete, TabularInline):
    model = TenantMembership
    autocomplete_fields = ("tenant",)
    # One is taken away on its own page, which asks why.
    can_delete = False
    show_change_link = True
    extra = 0
    # Rows of a form that asks for more are not made: a page of thousands would hold a thread for seconds.
    max_num = 200
    tab = True

    def get_formset(self, request: HttpRequest, obj: Any = None, **options: Any) -> Any:
        return super().get_formset(request, obj, **{"absolute_max": self.max_num, **options})

    def get_queryset(self, request: HttpRequest) -> QuerySet[TenantMembership]:
        rows: QuerySet[TenantMembership] = super().get_queryset(request)
        return rows.select_related("user", "tenant")  # a membership's name is made of theirs


@admin.register(User)
class UserAdmin(SuperusersOnly, DjangoUserAdmin):  # type: ignore[type-arg]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "email", "is_active", "is_staff", "sees", "last_login")
    list_filter = ("is_staff", "is_superuser", "is_active")
    filter_horizontal = ()
    inlines = (MembershipInline,)
    add_fieldsets = DjangoUserAdmin.add_fieldsets  # the theme has some of its own, which are none
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Who it is", {"fields": ("first_name", "last_name", "email")}),
        ("What they may do", {"fields": ("is_active", "is_staff", "is_superuser")}),
        ("Record", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("last_login", "date_joined")

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        rows: QuerySet[User] = super().get_queryset(request)
        return rows.annotate(memberships=Count("tenant_memberships"))

    @display(description="Sees", label={"everything": "info"})
    def sees(self, user: Any) -> str:
        if user.is_superuser:
            return "everything"
        return f"{user.memberships} tenant{'' if user.memberships == 1 else 's'}"

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # With the person would go the record of what they did; they are made inactive instead.
        return False


@admin.register(LogEntry)
class LogEntryAdmin(scoping.AllowlistedFilters, ReadOnlyAdminMixin, ModelAdmin):
    """What was done, by whom and why. Staff see what was done to the tenants of their memberships."""

    list_display = ("when", "who", "what", "whose", "kind")
    list_select_related = ("user", "content_type")
    search_fields = ("user__username", "object_repr", "change_message")
    search_help_text = "A person, a tenant, or words of what was done and why."
    date_hierarchy = "action_time"
    ordering = ("-action_time",)
    fields = ("when", "who", "what", "whose", "kind")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[LogEntry]:
        rows: QuerySet[LogEntry] = super().get_queryset(request)
        tids = scoping.tids_of(request.user)
        if tids is None:
            return rows
        theirs = Q(content_type=ContentType.objects.get_for_model(Tenant), object_id__in=tids)
        for name in OF_TENANTS:
            model = apps.get_model(name)
            ids = model._default_manager.filter(tenant__in=tids).annotate(text=Cast("pk", CharField())).values("text")
            theirs |= Q(content_type=ContentType.objects.get_for_model(model), object_id__in=ids)
        return rows.filter(theirs)

    @display(description="When", ordering="action_time")
    def when(self, entry: LogEntry) -> str:
        return f"{entry.action_time:%Y-%m-%d %H:%M:%S}"

    @display(description="Who", ordering="user__username")
    def who(self, entry: LogEntry) -> str:
        return entry.user.get_username()

    @display(description="To which")
    def whose(self, entry: LogEntry) -> str:
        return entry.object_repr

    @display(description="Kind")
    def kind(self, entry: LogEntry) -> str:
        return str(entry.content_type.name) if entry.content_type else ""

    @display(description="What and why")
    def what(self, entry: LogEntry) -> str:
        return entry.get_change_message() or entry.get_action_flag_display()

    def has_module_permission(self, request: HttpRequest) -> bool:
        return scoping.has_role(request.user, None)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return scoping.has_role(request.user, None)
