"""What operators do: a POST with a reason, by a role that may, on record in the tenant's history before it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme

from console.page import Guarded, tenant_of
from core import errors
from core.admin.audit_reason import reason_in
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tenants.scoping import Role


class Act(Guarded):
    """One thing an operator may do. Answers with a redirect and a sentence about what happened."""

    http_method_names = ["post"]
    least = Role.OPERATOR
    # Where the person goes afterwards, unless the form says another page of this site.
    back = "console:overview"

    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        raise NotImplementedError

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        tenant = tenant_of(request, request.POST.get("tenant", ""), self.least)
        if reason := self.reason():
            try:
                messages.success(request, self.act(tenant, reason))
            except errors.CodeqError as error:
                messages.error(request, f"Nothing was done: {error}")
        return self.leave()

    def reason(self) -> str:
        """Why, in the person's words; empty after telling them that there must be some."""
        reason = reason_in(self.request)
        if not reason:
            messages.error(self.request, "Nothing was done: say why, it is kept with what you do.")
        return reason

    def leave(self) -> HttpResponse:
        to = self.request.POST.get("next", "")
        if url_has_allowed_host_and_scheme(to, {self.request.get_host()}, self.request.is_secure()):
            return redirect(to)
        return redirect(self.back)


@contextmanager
def recorded(request: HttpRequest, tenant: TenantSnapshot, what: str, reason: str) -> Iterator[None]:
    """Do the block with its record: what fails leaves none, and what cannot be recorded is not done."""
    with transaction.atomic():
        LogEntry.objects.create(
            user_id=request.user.pk or 0,
            content_type_id=ContentType.objects.get_for_model(Tenant).pk,
            object_id=tenant.tid,
            object_repr=tenant.slug[:200],
            action_flag=CHANGE,
            change_message=f"{what}: {reason}",
        )
        yield
