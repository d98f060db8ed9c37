"""Whose rows a member of staff sees in the console, and on which they may act: superusers all, others by membership."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import QuerySet
from django.http import HttpRequest

from core.admin.audit_reason import DeletedWithReason, SavedWithReason
from core.admin.fields import SafeAutocomplete
from tenants.models import Tenant, TenantMembership

Role = TenantMembership.Role
_RANK = {Role.VIEWER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}
User = AbstractBaseUser | AnonymousUser


def is_unlimited(user: User) -> bool:
    """Whether this person sees every tenant."""
    return bool(user.is_active and getattr(user, "is_superuser", False))


def roles_of(user: User) -> dict[str, Role]:
    """tid -> role of this person's memberships, read once in a request."""
    if not user.is_active or not user.pk:
        return {}
    roles: dict[str, Role] | None = getattr(user, "_tenant_roles", None)
    if roles is None:
        rows = TenantMembership.objects.filter(user_id=user.pk).values_list("tenant_id", "role")
        roles = {tid: Role(role) for tid, role in rows}
        setattr(user, "_tenant_roles", roles)  # noqa: B010 - no attribute of the model
    return roles


def tids_of(user: User, least: Role = Role.VIEWER) -> list[str] | None:
    """The tenants for which this person has at least this role; None = all there are."""
    if is_unlimited(user):
        return None
    return [tid for tid, role in roles_of(user).items() if _RANK[role] >= _RANK[least]]


def has_role(user: User, tid: str | None, least: Role = Role.VIEWER) -> bool:
    """Whether this person has at least this role for the tenant; without a tenant: for any."""
    tids = tids_of(user, least)
    if tids is None:
        return True
    return bool(tids) if tid is None else tid in tids


def tenants_of(user: User, least: Role = Role.VIEWER) -> QuerySet[Tenant]:
    return visible(Tenant.objects.all(), user, "pk", least)


def visible(rows: QuerySet[Any], user: User, path: str = "tenant", least: Role = Role.VIEWER) -> QuerySet[Any]:
    """Of these rows those of the person's tenants; `path` leads from a row to its tenant."""
    tids = tids_of(user, least)
    return rows if tids is None else rows.filter(**{f"{path}__in": tids})


class TenantFilter(admin.SimpleListFilter):
    """A list's filter by tenant that names only the tenants this person may know of."""

    title = "tenant"
    parameter_name = "tenant"
    path: ClassVar[str] = "tenant"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        # A longer list is no help: the search finds what is not in it.
        return list(tenants_of(request.user).order_by("slug").values_list("pk", "slug")[:200])

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(**{self.path: self.value()}) if self.value() else queryset


class OffersFilters:
    """A list that is filtered by what it offers and by nothing else.

    Django lets an address filter by every column, shown or not: a sealed one by its beginning, a text by an expression
    that keeps the database busy for minutes.
    """

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        field = lookup.partition("__")[0]
        fields = self.model._meta.get_fields()  # type: ignore[attr-defined]
        columns = {name for each in fields for name in (each.name, getattr(each, "attname", each.name))}
        offers = {getattr(each, "parameter_name", each) for each in self.get_list_filter(request)}  # type: ignore[attr-defined]
        if field in columns - offers - {self.date_hierarchy}:  # type: ignore[attr-defined]
            return False
        return bool(super().lookup_allowed(lookup, value, request))  # type: ignore[misc]


class TenantScopedAdmin(OffersFilters, SafeAutocomplete, SavedWithReason, DeletedWithReason):
    """Rows that belong to a tenant. Rights come from memberships alone, for every view, action and form field."""

    tenant_path: ClassVar[str] = "tenant"  # from a row to its tenant, as a query writes it
    view_role: ClassVar[Role] = Role.VIEWER
    change_role: ClassVar[Role | None] = Role.ADMIN  # None: superusers only
    show_full_result_count = False

    def tid_of(self, obj: Any) -> str | None:
        """The tenant of a row, or of a row's id (an action's permission gets that instead of the row)."""
        if obj is None:
            return None
        if isinstance(obj, str):
            row = self.model._default_manager.filter(pk=obj).values_list(self.tenant_path, flat=True).first()
            return "" if row is None else str(row)
        *steps, last = self.tenant_path.split("__")
        for step in steps:
            obj = getattr(obj, step)
        return str(obj.pk if last == "pk" else getattr(obj, f"{last}_id"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return visible(super().get_queryset(request), request.user, self.tenant_path, self.view_role)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return has_role(request.user, None, self.view_role)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), self.view_role)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        if self.change_role is None:
            return is_unlimited(request.user)
        return has_role(request.user, self.tid_of(obj), self.change_role)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_change_permission(request, obj)

    def deletion_subject(self, row: Any) -> Tenant:
        # A row that is gone says no more whose it was: its tenant's staff would not find its own history.
        return Tenant.objects.get(pk=self.tid_of(row))

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.related_model is Tenant:
            # The field's choices are also what a forged form is checked against.
            kwargs["queryset"] = tenants_of(request.user, self.change_role or Role.ADMIN)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)
