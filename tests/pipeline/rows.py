"""Build rows of the marts in PostgreSQL, for tests of their readers.

Every column has a default value.
"""

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


def row(mart: type[Mart], tid: str, **values: Any) -> Any:
    """Build a row of the mart for `DAY` and, in marts by hour, for the hour from 09:00 UTC."""
    values = {"date": DAY, "tenant_id": tid} | values
    day: date = values["date"]
    for column in mart._meta.fields:
        if isinstance(column, models.DateTimeField):
            values.setdefault(column.name, datetime(day.year, day.month, day.day, 9, tzinfo=UTC))
        elif type(column) in VALUES:
            values.setdefault(column.name, VALUES[type(column)])
    return mart(**values)
