"""The reason for an operator's action: required first, then stored in the row's history."""

from __future__ import annotations

import json
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from unfold.admin import ModelAdmin
from unfold.forms import ActionForm, BaseDialogForm
from unfold.widgets import UnfoldAdminTextInputWidget

REASON_CHARS = 500


class ReasonForm(BaseDialogForm):
    """The dialog of an action, with a field for the reason, which is kept in the history."""

    reason = forms.CharField(max_length=REASON_CHARS, widget=UnfoldAdminTextInputWidget)


class ReasonActionForm(ActionForm):
    """The form of the bulk actions above a list, with a field for the reason."""

    reason = forms.CharField(
        max_length=REASON_CHARS, required=False, label="", widget=UnfoldAdminTextInputWidget({"placeholder": "Reason"})
    )


class ReasonMissing(Exception):
    """A deletion was requested without a reason."""


def reason_in(request: HttpRequest) -> str:
    """Return the reason in the submitted form, or an empty string."""
    # PostgreSQL rejects NUL in text.
    return request.POST.get("reason", "").replace("\0", "").strip()[:REASON_CHARS]


class ReasonField(forms.CharField):
    """A form field that never counts as changed, so that the history does not list it."""

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class SaveReasonMixin(ModelAdmin):
    """Require a reason to add or change a row.

    codeq_site/templates/admin/submit_line.html shows the field.
    """

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **options: Any) -> Any:
        form = super().get_form(request, obj, change=change, **options)
        if options.get("fields", ()) is None:  # Django passes `fields=None` to list the fields of the row
            return form
        return type(form)(form.__name__, (form,), {"reason": ReasonField(max_length=REASON_CHARS)})

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return super().log_addition(request, obj, _with_reason(request, message))

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return super().log_change(request, obj, _with_reason(request, message))


def _with_reason(request: HttpRequest, message: Any) -> Any:
    """Return Django's description of a change, with the reason.

    A message that is a string comes from an action of codeQ, and contains the reason already.
    """
    reason = reason_in(request)
    if isinstance(message, str) or not reason:  # the form for a new password has no reason field
        return message
    description = LogEntry(change_message=json.dumps(message)).get_change_message().rstrip(".")
    return f"{description}: {reason}"


class DeleteReasonMixin(ModelAdmin):
    """Require a reason to delete rows.

    codeq_site/templates/unfold/helpers/delete_submit_line.html shows the field.
    """

    def deletion_subject(self, row: Any) -> Model:
        """Return the object in whose history the deletion of the row is recorded."""
        subject: Model = row
        return subject

    def log_deletions(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        # Django calls this before every deletion, of one row or many, so that no deletion is left out.
        reason = reason_in(request)
        if not reason:
            raise ReasonMissing
        for row in queryset:
            subject = self.deletion_subject(row)
            LogEntry.objects.log_actions(
                user_id=request.user.pk or 0,
                queryset=[subject],
                action_flag=DELETION if subject is row else CHANGE,
                change_message=f"Deleted {self.opts.verbose_name} {row}: {reason}",
            )

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        try:
            answer: HttpResponse = super().delete_view(request, object_id, extra_context)
            return answer
        except ReasonMissing:
            return self._require_reason(request)

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        try:
            # Django deletes several rows without a transaction. If the deletion fails, the history must not record it.
            with transaction.atomic():
                answer: HttpResponse | None = super().response_action(request, queryset)
                return answer
        except ReasonMissing:
            return self._require_reason(request)

    def _require_reason(self, request: HttpRequest) -> HttpResponse:
        messages.error(request, "Nothing was deleted. Enter a reason; it is kept in the history.")
        return redirect(request.get_full_path())
