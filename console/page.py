"""What every page of the console is: a view inside the admin site, for one person, about their tenants only."""

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


def inside(view: type[View[Any]]) -> Callable[..., HttpResponseBase]:
    """The view behind the admin's login: staff only, CSRF-checked, never cached."""
    return admin.site.admin_view(view.as_view())


class Guarded(View):
    """What goes wrong below is an answer, not a crash: not there, not to be asked so, not now."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            return super().dispatch(request, *args, **kwargs)
        except errors.NotFound as error:
            raise Http404(str(error)) from error
        except errors.InvalidRequest as error:
            raise BadRequest(str(error)) from error
        except errors.Unavailable as error:
            context = {**admin.site.each_context(request), "title": "Not now", "why": str(error)}
            return render(request, "console/unavailable.html", context, status=503)


class Page(Guarded, TemplateView):
    title = ""

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        self.request.current_app = admin.site.name
        context = {**admin.site.each_context(self.request), "title": self.title}
        return {**context, **super().get_context_data(**extra)}


def tenant_of(request: HttpRequest, named: str, least: Role = Role.VIEWER) -> TenantSnapshot:
    """The tenant a request is about, by its id, or by its name as people write it. One the person may not see is a
    404, as one that does not exist; one they may see and not act on is a 403."""
    # PostgreSQL takes no NUL, and what it refuses would look as if it were away.
    if "\0" in named:
        raise Http404("No such tenant.")
    tenant = tenant_cache.find_by_tid(named) if named and scoping.has_role(request.user, named) else None
    if tenant is None and named:
        tid = scoping.tenants_of(request.user).filter(slug=named.lower()).values_list("tid", flat=True).first()
        tenant = tenant_cache.find_by_tid(tid) if tid else None
    if tenant is None:
        raise Http404("No such tenant.")
    if not scoping.has_role(request.user, tenant.tid, least):
        raise PermissionDenied("Your role does not allow this.")
    return tenant
