"""Mixins of the admin."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from unfold.decorators import display
from unfold.paginator import InfinitePaginator


class ReadOnlyAdminMixin:
    """Show rows that codeQ writes, without permission to add, change or delete them."""

    # This paginator neither counts the rows nor numbers the pages, which would read the whole table.
    paginator = InfinitePaginator
    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class QueueColumnMixin:
    """Show the column `command` under the name that the console uses for it."""

    @display(description="Queue", ordering="command")
    def queue(self, row: Any) -> str:
        return str(row.command)
