"""Read the marts: one tenant's rows of a period, page by page.

Every query uses the index of the mart's key, which begins with tenant and day.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from typing import Any, NamedTuple

import msgspec
from django.db import models
from django.db.models import Q

from core.errors import InvalidRequest
from pipeline.models import Mart

MAX_DAYS = 92
DEFAULT_DAYS = 7
MIN_DATE, MAX_DATE = dt.date(2000, 1, 1), dt.date(2200, 1, 1)
KEY_TYPES = {models.DateField: dt.date, models.DateTimeField: dt.datetime, models.TextField: str}


class DateRange(NamedTuple):
    """The days from `since` up to, but not including, `until`."""

    since: dt.date
    until: dt.date


class MartPage(NamedTuple):
    rows: list[Any]
    cursor: str | None  # of the next page; None on the last page


def parse_period(since: dt.date | None, until: dt.date | None) -> DateRange:
    """Return the requested days, or the default ones.

    Raise InvalidRequest if the period is empty or too long.
    """
    until = until or dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1)
    if not MIN_DATE < until <= MAX_DATE or (since and since < MIN_DATE):
        raise InvalidRequest(f"from, to: must be between {MIN_DATE} and {MAX_DATE}")
    since = since or until - dt.timedelta(days=DEFAULT_DAYS)
    if not since < until:
        raise InvalidRequest("from: must be before `to`")
    if (until - since).days > MAX_DAYS:
        raise InvalidRequest(f"from, to: the period must not exceed {MAX_DAYS} days")
    return DateRange(since, until)


def read_page(
    mart: type[Mart], tid: str, period: DateRange, *, command: str | None, cursor: str | None, limit: int
) -> MartPage:
    """Return the next rows in the order of the mart's key."""
    key = get_key_columns(mart)
    rows: Any = mart._default_manager.filter(tenant_id=tid, date__gte=period.since, date__lt=period.until)
    if command is not None:
        if "command" not in key:
            raise InvalidRequest("command: this mart is not by command. Omit the parameter.")
        rows = rows.filter(command=command)
    if cursor is not None:
        after = dict(zip(key, _decode_cursor(mart, key, cursor), strict=True))
        # The condition on the day is redundant, but lets the index scan start at the day of the cursor.
        rows = rows.filter(Q(date__gte=after["date"]) & _follows(list(after.items())))
    records = list(rows.order_by(*key)[: limit + 1])
    return MartPage(records[:limit], _encode_cursor(records[limit - 1], key) if len(records) > limit else None)


def get_key_columns(mart: type[Mart]) -> tuple[str, ...]:
    """Return the columns that identify a row within its tenant, beginning with the day."""
    (unique,) = (item for item in mart._meta.constraints if isinstance(item, models.UniqueConstraint))
    return tuple(unique.fields[1:])


def _follows(key: list[tuple[str, Any]]) -> Q:
    """Return the condition for rows that come after this key."""
    (name, value), *rest = key
    is_greater = Q(**{f"{name}__gt": value})
    return is_greater | (Q(**{name: value}) & _follows(rest)) if rest else is_greater


def _encode_cursor(row: Any, key: tuple[str, ...]) -> str:
    values = [getattr(row, name) for name in key]
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")


def _decode_cursor(mart: type[Mart], key: tuple[str, ...], cursor: str) -> Any:
    kinds = tuple(KEY_TYPES[type(mart._meta.get_field(name))] for name in key)
    try:
        values: Any = msgspec.json.decode(
            base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=tuple.__class_getitem__(kinds)
        )
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise InvalidRequest("cursor: not valid. Use the cursor of the previous page.") from None
    if any(
        "\x00" in value if isinstance(value, str) else isinstance(value, dt.datetime) and not value.tzinfo
        for value in values
    ):
        raise InvalidRequest("cursor: not valid. Use the cursor of the previous page.")
    return values
