"""Base classes of the console's views, and their access to the user's tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.generic import TemplateView, View

from core import errors
from tenants import scoping
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from tenants.scoping import Role


def as_admin_view(view: type[View[Any]]) -> Callable[..., HttpResponseBase]:
    """Wrap a view in the admin's login: staff only, CSRF-checked, never cached."""
    return admin.site.admin_view(view.as_view())


class ConsoleView(View):
    """A view that answers InvalidRequest with 400, NotFound with 404 and Unavailable with 503."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            return super().dispatch(request, *args, **kwargs)
        except errors.NotFound as error:
            raise Http404(str(error)) from error
        except errors.InvalidRequest as error:
            raise BadRequest(str(error)) from error
        except errors.Unavailable as error:
            context = {
                **admin.site.each_context(request),
                "title": "Service unavailable",
                "message": str(error),
            }
            return render(request, "console/unavailable.html", context, status=503)


class ConsolePage(ConsoleView, TemplateView):
    """A page with the admin's header and sidebar."""

    title = ""

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        self.request.current_app = admin.site.name
        context = {**admin.site.each_context(self.request), "title": self.title}
        return {**context, **super().get_context_data(**extra)}


def get_tenant(request: HttpRequest, name: str, required_role: Role = Role.VIEWER) -> TenantSnapshot:
    """Return the tenant with this id or slug.

    Raises Http404 for a tenant that does not exist or that the user may not see, and PermissionDenied if the user's
    role is lower than required.
    """
    # PostgreSQL rejects NUL, and that error would be reported as an unavailable database.
    if "\0" in name:
        raise Http404("No such tenant.")
    tenant = tenant_cache.find_by_tid(name) if name and scoping.has_role(request.user, name) else None
    if tenant is None and name:
        tid = scoping.tenants_of(request.user).filter(slug=name.lower()).values_list("tid", flat=True).first()
        tenant = tenant_cache.find_by_tid(tid) if tid else None
    if tenant is None:
        raise Http404("No such tenant.")
    if not scoping.has_role(request.user, tenant.tid, required_role):
        raise PermissionDenied("Your role does not allow this.")
    return tenant
