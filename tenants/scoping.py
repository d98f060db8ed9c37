"""Access of console users to tenants.

Superusers see and change the rows of all tenants. Other users need a membership, which has a role.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import QuerySet
from django.http import HttpRequest

from core.admin.audit_reason import DeleteReasonMixin, SaveReasonMixin
from core.admin.fields import SafeAutocomplete
from tenants.models import Tenant, TenantMembership

Role = TenantMembership.Role
_RANK = {Role.VIEWER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}
User = AbstractBaseUser | AnonymousUser


def is_active_superuser(user: User) -> bool:
    """Whether the user is an active superuser, who may see and change every tenant."""
    return bool(user.is_active and getattr(user, "is_superuser", False))


def roles_of(user: User) -> dict[str, Role]:
    """Return the roles of the user's memberships by tid. Reads them once per request."""
    if not user.is_active or not user.pk:
        return {}
    roles: dict[str, Role] | None = getattr(user, "_tenant_roles", None)
    if roles is None:
        rows = TenantMembership.objects.filter(user_id=user.pk).values_list("tenant_id", "role")
        roles = {tid: Role(role) for tid, role in rows}
        setattr(user, "_tenant_roles", roles)  # noqa: B010 - not an attribute of the model
    return roles


def tids_of(user: User, min_role: Role = Role.VIEWER) -> list[str] | None:
    """Return the ids of the tenants for which the user has at least this role; None means all."""
    if is_active_superuser(user):
        return None
    return [tid for tid, role in roles_of(user).items() if _RANK[role] >= _RANK[min_role]]


def has_role(user: User, tid: str | None, min_role: Role = Role.VIEWER) -> bool:
    """Whether the user has at least this role for the tenant, or for any if `tid` is None."""
    tids = tids_of(user, min_role)
    if tids is None:
        return True
    return bool(tids) if tid is None else tid in tids


def tenants_of(user: User, min_role: Role = Role.VIEWER) -> QuerySet[Tenant]:
    """Return the tenants for which the user has at least this role."""
    return filter_visible(Tenant.objects.all(), user, "pk", min_role)


def filter_visible(
    rows: QuerySet[Any], user: User, path: str = "tenant", min_role: Role = Role.VIEWER
) -> QuerySet[Any]:
    """Return the rows that belong to the user's tenants.

    `path` is the lookup from a row to its tenant.
    """
    tids = tids_of(user, min_role)
    return rows if tids is None else rows.filter(**{f"{path}__in": tids})


class TenantFilter(admin.SimpleListFilter):
    """A list filter that offers only the user's tenants."""

    title = "tenant"
    parameter_name = "tenant"
    path: ClassVar[str] = "tenant"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        # A longer list would be hard to use. The search finds the other tenants.
        return list(tenants_of(request.user).order_by("slug").values_list("pk", "slug")[:200])

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(**{self.path: self.value()}) if self.value() else queryset


class AllowlistedFilters:
    """An admin mixin that refuses filters other than `list_filter` and `date_hierarchy`.

    In the URL of a list, Django accepts a filter by any column, even a hidden one. An attacker could use `__startswith`
    to guess an encrypted secret, and `__regex` to keep the database busy for minutes.
    """

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        field = lookup.partition("__")[0]
        fields = self.model._meta.get_fields()  # type: ignore[attr-defined]
        columns = {name for column in fields for name in (column.name, getattr(column, "attname", column.name))}
        filters = self.get_list_filter(request)  # type: ignore[attr-defined]
        allowed = {getattr(item, "parameter_name", item) for item in filters}
        if field in columns - allowed - {self.date_hierarchy}:  # type: ignore[attr-defined]
            return False
        return bool(super().lookup_allowed(lookup, value, request))  # type: ignore[misc]


class TenantScopedAdmin(AllowlistedFilters, SafeAutocomplete, SaveReasonMixin, DeleteReasonMixin):
    """A model admin for rows that belong to a tenant.

    Memberships decide who may use its views, actions and form fields. Django's permissions have no effect.
    """

    tenant_path: ClassVar[str] = "tenant"  # the lookup from a row to its tenant
    view_role: ClassVar[Role] = Role.VIEWER
    change_role: ClassVar[Role | None] = Role.ADMIN  # None: superusers only
    show_full_result_count = False

    def tid_of(self, obj: Any) -> str | None:
        """Return the tid of a row, given the row or its id.

        Unfold passes the id to the permission checks of actions.
        """
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
        return filter_visible(super().get_queryset(request), request.user, self.tenant_path, self.view_role)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return has_role(request.user, None, self.view_role)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_role(request.user, self.tid_of(obj), self.view_role)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        if self.change_role is None:
            return is_active_superuser(request.user)
        return has_role(request.user, self.tid_of(obj), self.change_role)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_change_permission(request, obj)

    def deletion_subject(self, row: Any) -> Tenant:
        # Log the deletion with the tenant: a deleted row has no tenant, so the tenant's users could not see its log.
        return Tenant.objects.get(pk=self.tid_of(row))

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.related_model is Tenant:
            # Django validates a submitted form against these choices, so a forged form cannot name another tenant.
            kwargs["queryset"] = tenants_of(request.user, self.change_role or Role.ADMIN)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)
