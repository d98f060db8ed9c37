"""Base class of operators' actions, and their record in the tenant's history."""

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

from console.page import ConsoleView, get_tenant
from core import errors
from core.admin.audit_reason import reason_in
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tenants.scoping import Role


class OperatorAction(ConsoleView):
    """An action of an operator: a POST with a reason.

    The response redirects to the page that the form names, which shows a message with the outcome.
    """

    http_method_names = ["post"]
    required_role = Role.OPERATOR
    # The page to redirect to if the form's field `next` does not name a page of this site.
    next_page = "console:overview"

    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        """Do the action and return the message for the user."""
        raise NotImplementedError

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        tenant = get_tenant(request, request.POST.get("tenant", ""), self.required_role)
        if reason := self.read_reason():
            try:
                messages.success(request, self.perform(tenant, reason))
            except errors.CodeqError as error:
                messages.error(request, f"Nothing was changed: {error}")
        return self.redirect_back()

    def read_reason(self) -> str:
        """Return the user's reason. If it is empty, add an error message."""
        reason = reason_in(self.request)
        if not reason:
            messages.error(self.request, "Nothing was changed. Enter a reason; it is kept in the history.")
        return reason

    def redirect_back(self) -> HttpResponse:
        """Redirect to the page that the form names, if it is on this site, else to `next_page`."""
        url = self.request.POST.get("next", "")
        if url_has_allowed_host_and_scheme(url, {self.request.get_host()}, self.request.is_secure()):
            return redirect(url)
        return redirect(self.next_page)


@contextmanager
def record_action(request: HttpRequest, tenant: TenantSnapshot, action: str, reason: str) -> Iterator[None]:
    """Record the action in the tenant's history and run the block, in one transaction.

    A block that fails leaves no record. A block whose record cannot be written does not run.
    """
    with transaction.atomic():
        LogEntry.objects.create(
            user_id=request.user.pk or 0,
            content_type_id=ContentType.objects.get_for_model(Tenant).pk,
            object_id=tenant.tid,
            object_repr=tenant.slug[:200],
            action_flag=CHANGE,
            change_message=f"{action}: {reason}",
        )
        yield
