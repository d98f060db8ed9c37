"""Rows in the console that the system writes, and that may be very many."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from unfold.paginator import InfinitePaginator


class ReadOnlyAdminMixin:
    """For an admin of such rows: nobody adds, changes or deletes them there."""

    # Neither counts the table nor numbers its pages: both would read all of it.
    paginator = InfinitePaginator
    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
