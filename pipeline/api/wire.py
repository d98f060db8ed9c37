"""The wire types of the marts. Rows are read off the models: their columns and words are said there, once."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Union

import msgspec
from django.db import models
from msgspec import Meta, defstruct

from pipeline import selectors
from pipeline.models import MARTS, Mart
from queues.api.schemas import NO_NUL, Command, Query, View

KINDS: dict[type[models.Field[Any, Any]], Any] = {
    models.DateField: dt.date,
    models.DateTimeField: Annotated[dt.datetime, Meta(tz=True)],
    models.TextField: str,
    models.IntegerField: int,
    models.BigIntegerField: int,
    models.FloatField: float,
}
# A key may hold an address of 2,000 characters.
Cursor = Annotated[str, Meta(min_length=1, max_length=8192, pattern=NO_NUL, description="`cursor` of the page before.")]


class InsightsQuery(Query, kw_only=True):
    from_: Annotated[dt.date | None, Meta(description="The first day. Seven days before `to` if absent.")] = (
        msgspec.field(default=None, name="from")
    )
    to: Annotated[dt.date | None, Meta(description="The day after the last one. Tomorrow if absent.")] = None
    command: Command | None = None
    cursor: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="The most rows to answer.")] = 200


def _row(model: type[Mart]) -> Any:
    fields: list[Any] = []
    for column in model._meta.fields:
        if column.name in ("id", "tenant"):
            continue
        said: Any = {"description": column.help_text} if column.help_text else {}
        kind: Any = Annotated[KINDS[type(column)], Meta(**said)]
        fields.append((column.name, kind | None, None) if column.null else (column.name, kind))
    return defstruct(f"{model.__name__}Row", fields, bases=(View,), namespace={"__doc__": model.__doc__}, kw_only=True)


def _page(mart: str, model: type[Mart]) -> Any:
    fields: list[Any] = [("rows", list[_row(model)]), ("cursor", str | None, None)]  # type: ignore[misc]
    says = {"__doc__": f"Rows of the mart `{mart}`; `cursor` where there are more."}
    name = f"{model.__name__}Page"
    return defstruct(name, fields, bases=(View,), namespace=says, tag_field="mart", tag=mart, kw_only=True)


PAGES: dict[str, Any] = {mart: _page(mart, model) for mart, model in MARTS.items()}
ROWS = {mart: msgspec.structs.fields(page)[0].type.__args__[0] for mart, page in PAGES.items()}
Insights: Any = Union[tuple(PAGES.values())]  # noqa: UP007 - of a list that is made


def insights(mart: str, page: selectors.Page) -> Any:
    row = ROWS[mart]
    columns = [field.name for field in msgspec.structs.fields(row)]
    rows = [row(**{name: getattr(found, name) for name in columns}) for found in page.rows]
    return PAGES[mart](rows=rows, cursor=page.cursor)
