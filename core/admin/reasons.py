"""Why an operator does something: asked for before it is done, and kept with it."""

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
    """What every act of an operator is asked for, and what stays in the tenant's history."""

    reason = forms.CharField(max_length=REASON_CHARS, widget=UnfoldAdminTextInputWidget)


class ReasonedActions(ActionForm):
    """The form above a list: an action there asks for its reason as every other does."""

    reason = forms.CharField(
        max_length=REASON_CHARS, required=False, label="", widget=UnfoldAdminTextInputWidget({"placeholder": "Reason"})
    )


class NoReason(Exception):
    """Asked to delete, and not told why."""


def reason_in(request: HttpRequest) -> str:
    """The reason in the person's words, if there is any; PostgreSQL takes no NUL in a text."""
    return request.POST.get("reason", "").replace("\0", "").strip()[:REASON_CHARS]


class ReasonField(forms.CharField):
    """Of the form and not of the row: it is never among what was changed."""

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class SavedWithReason(ModelAdmin):
    """Rows are added and changed for a reason, which templates/admin/submit_line.html asks for beside the button."""

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **options: Any) -> Any:
        form = super().get_form(request, obj, change=change, **options)
        if options.get("fields", ()) is None:  # asked which fields the row has
            return form
        return type(form)(form.__name__, (form,), {"reason": ReasonField(max_length=REASON_CHARS)})

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return super().log_addition(request, obj, _because(request, message))

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return super().log_change(request, obj, _because(request, message))


def _because(request: HttpRequest, message: Any) -> Any:
    """What a form has changed, as Django says it, and why; an act of ours has said why itself."""
    reason = reason_in(request)
    if isinstance(message, str) or not reason:  # a password is changed on a page of Django's own
        return message
    words = LogEntry(change_message=json.dumps(message)).get_change_message().rstrip(".")
    return f"{words}: {reason}"


class DeletedWithReason(ModelAdmin):
    """Rows are deleted, one or many, for a reason only; unfold/helpers/delete_submit_line.html asks for it."""

    def deletion_subject(self, row: Any) -> Model:
        """In whose history it stays that this row was deleted."""
        found: Model = row
        return found

    def log_deletions(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        # Django calls this before it deletes, whichever way it was asked to, so nothing is deleted around it.
        reason = reason_in(request)
        if not reason:
            raise NoReason
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
        except NoReason:
            return self._ask_again(request)

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        try:
            # Django deletes one row in a transaction, but not many: what fails must leave no record.
            with transaction.atomic():
                answer: HttpResponse | None = super().response_action(request, queryset)
                return answer
        except NoReason:
            return self._ask_again(request)

    def _ask_again(self, request: HttpRequest) -> HttpResponse:
        messages.error(request, "Nothing was deleted: say why, it is kept with what you do.")
        return redirect(request.get_full_path())
