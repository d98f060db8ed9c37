"""Rows of large tables by their dates, as the admin's date hierarchy asks for them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db.models import Max, Min, Model, QuerySet

M = TypeVar("M", bound=Model)


class IndexedDateHierarchyQuerySet(QuerySet[M, M]):
    """Answers from an index which days, months or years there are: all between the first and the last.

    Django's own reads every row to leave out those in which there is nothing; of ten million that takes seconds.
    """

    def datetimes(self, field_name: str, kind: Any, order: str = "ASC", tzinfo: Any = None) -> Any:
        ends = self.aggregate(first=Min(field_name), last=Max(field_name))
        found: list[datetime] = []
        at = ends["first"] and _start(ends["first"], kind)
        while at is not None and at <= ends["last"]:
            found.append(at)
            # Longer than any of these, and shorter than two.
            at = _start(
                at + {"year": timedelta(days=370), "month": timedelta(days=32)}.get(kind, timedelta(days=1)), kind
            )
        return found if order == "ASC" else found[::-1]


def _start(moment: datetime, kind: str) -> datetime:
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return day
    return day.replace(day=1) if kind == "month" else day.replace(day=1, month=1)
