"""Reading the marts: a tenant's rows of some days, page by page. Everything goes through the key's index, which begins
with tenant and day."""

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

MOST_DAYS = 92
USUAL_DAYS = 7
FIRST, LAST = dt.date(2000, 1, 1), dt.date(2200, 1, 1)
KINDS = {models.DateField: dt.date, models.DateTimeField: dt.datetime, models.TextField: str}


class Days(NamedTuple):
    """`until` is not one of them."""

    since: dt.date
    until: dt.date


class Page(NamedTuple):
    rows: list[Any]
    cursor: str | None  # leads to the rows behind; None where there are none


def days(since: dt.date | None, until: dt.date | None) -> Days:
    """The days asked for, or the usual ones. InvalidRequest where they are too many or none."""
    until = until or dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1)
    if not FIRST < until <= LAST or (since and since < FIRST):
        raise InvalidRequest(f"from, to: days between {FIRST} and {LAST}")
    since = since or until - dt.timedelta(days=USUAL_DAYS)
    if not since < until:
        raise InvalidRequest("from: the day before `to`, or an earlier one")
    if (until - since).days > MOST_DAYS:
        raise InvalidRequest(f"from, to: at most {MOST_DAYS} days")
    return Days(since, until)


def page(mart: type[Mart], tid: str, asked: Days, *, command: str | None, cursor: str | None, limit: int) -> Page:
    """The next rows in the order of their key."""
    key = key_of(mart)
    rows: Any = mart._default_manager.filter(tenant_id=tid, date__gte=asked.since, date__lt=asked.until)
    if command is not None:
        if "command" not in key:
            raise InvalidRequest("command: this mart is not by command")
        rows = rows.filter(command=command)
    if cursor is not None:
        after = dict(zip(key, _read(mart, key, cursor), strict=True))
        # The first condition is the one that an index can start from.
        rows = rows.filter(Q(date__gte=after["date"]) & _behind(list(after.items())))
    found = list(rows.order_by(*key)[: limit + 1])
    return Page(found[:limit], _text(found[limit - 1], key) if len(found) > limit else None)


def key_of(mart: type[Mart]) -> tuple[str, ...]:
    """What makes a row one row, within its tenant; the day first."""
    (unique,) = (each for each in mart._meta.constraints if isinstance(each, models.UniqueConstraint))
    return tuple(unique.fields[1:])


def _behind(key: list[tuple[str, Any]]) -> Q:
    (name, value), *rest = key
    behind = Q(**{f"{name}__gt": value})
    return behind | (Q(**{name: value}) & _behind(rest)) if rest else behind


def _text(row: Any, key: tuple[str, ...]) -> str:
    values = [getattr(row, name) for name in key]
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")


def _read(mart: type[Mart], key: tuple[str, ...], cursor: str) -> Any:
    kinds = tuple(KINDS[type(mart._meta.get_field(name))] for name in key)
    try:
        values: Any = msgspec.json.decode(
            base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=tuple.__class_getitem__(kinds)
        )
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise InvalidRequest("cursor: not one that a page gave") from None
    if any(
        "\x00" in value if isinstance(value, str) else isinstance(value, dt.datetime) and not value.tzinfo
        for value in values
    ):
        raise InvalidRequest("cursor: not one that a page gave")
    return values
