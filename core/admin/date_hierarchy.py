"""The date hierarchy of the admin's lists, for large tables."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db.models import Max, Min, Model, QuerySet

M = TypeVar("M", bound=Model)


class IndexedDateHierarchyQuerySet(QuerySet[M, M]):
    """A queryset that lists the days, months or years between the first and the last row.

    It reads only the first and the last entry of an index. Django's queryset reads every row to leave out empty
    periods, which takes seconds for ten million rows.
    """

    def datetimes(self, field_name: str, kind: Any, order: str = "ASC", tzinfo: Any = None) -> Any:
        ends = self.aggregate(first=Min(field_name), last=Max(field_name))
        starts: list[datetime] = []
        # Each step leads from the start of a period into the next period.
        step = {"year": timedelta(days=370), "month": timedelta(days=32)}.get(kind, timedelta(days=1))
        start = ends["first"] and _start_of(ends["first"], kind)
        while start is not None and start <= ends["last"]:
            starts.append(start)
            start = _start_of(start + step, kind)
        return starts if order == "ASC" else starts[::-1]


def _start_of(moment: datetime, kind: str) -> datetime:
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return day
    return day.replace(day=1) if kind == "month" else day.replace(day=1, month=1)
