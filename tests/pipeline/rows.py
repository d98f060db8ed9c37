"""Rows of the marts in PostgreSQL for tests of what reads them: a value in every column, but for what is said."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

from django.db import models

from pipeline.models import Mart

DAY = date(2026, 3, 10)
VALUES: dict[type[models.Field[Any, Any]], Any] = {
    models.TextField: "render",
    models.IntegerField: 7,
    models.BigIntegerField: 2**40,
    models.FloatField: 0.125,
}


def row(mart: type[Mart], tid: str, **said: Any) -> Any:
    """A row of the day, and where it has hours of its tenth."""
    said = {"date": DAY, "tenant_id": tid} | said
    day: date = said["date"]
    for column in mart._meta.fields:
        if isinstance(column, models.DateTimeField):
            said.setdefault(column.name, datetime(day.year, day.month, day.day, 9, tzinfo=UTC))
        elif type(column) in VALUES:
            said.setdefault(column.name, VALUES[type(column)])
    return mart(**said)
