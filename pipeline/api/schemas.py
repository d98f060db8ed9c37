"""The API schemas of the marts, generated from the models.

Columns and help texts are defined only in the models.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Union

import msgspec
from django.db import models
from msgspec import Meta, defstruct

from pipeline import selectors
from pipeline.models import MARTS, Mart
from queues.api.schemas import NO_NUL, Command, QueryParameters, ResponseBody

TYPES: dict[type[models.Field[Any, Any]], Any] = {
    models.DateField: dt.date,
    models.DateTimeField: Annotated[dt.datetime, Meta(tz=True)],
    models.TextField: str,
    models.IntegerField: int,
    models.BigIntegerField: int,
    models.FloatField: float,
}
# A cursor holds a row's key, which may contain an endpoint address of 2,000 characters.
Cursor = Annotated[
    str, Meta(min_length=1, max_length=8192, pattern=NO_NUL, description="`cursor` of the previous page.")
]


class InsightsQuery(QueryParameters, kw_only=True):
    from_: Annotated[dt.date | None, Meta(description="First day. Default: seven days before `to`.")] = msgspec.field(
        default=None, name="from"
    )
    to: Annotated[dt.date | None, Meta(description="Day after the last day. Default: tomorrow.")] = None
    command: Command | None = None
    cursor: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="Maximum number of rows to return.")] = 200


def _define_row(model: type[Mart]) -> Any:
    fields: list[Any] = []
    for column in model._meta.fields:
        if column.name in ("id", "tenant"):
            continue
        metadata: Any = {"description": column.help_text} if column.help_text else {}
        kind: Any = Annotated[TYPES[type(column)], Meta(**metadata)]
        fields.append((column.name, kind | None, None) if column.null else (column.name, kind))
    return defstruct(
        f"{model.__name__}Row", fields, bases=(ResponseBody,), namespace={"__doc__": model.__doc__}, kw_only=True
    )


def _define_page(mart: str, model: type[Mart]) -> Any:
    fields: list[Any] = [("rows", list[_define_row(model)]), ("cursor", str | None, None)]  # type: ignore[misc]
    namespace = {"__doc__": f"Rows of the mart `{mart}`. `cursor` is present if there are more rows."}
    name = f"{model.__name__}Page"
    return defstruct(name, fields, bases=(ResponseBody,), namespace=namespace, tag_field="mart", tag=mart, kw_only=True)


PAGES: dict[str, Any] = {mart: _define_page(mart, model) for mart, model in MARTS.items()}
ROWS = {mart: msgspec.structs.fields(page)[0].type.__args__[0] for mart, page in PAGES.items()}
Insights: Any = Union[tuple(PAGES.values())]  # noqa: UP007 - the members are only known at run time


def build_insights(mart: str, page: selectors.MartPage) -> Any:
    row = ROWS[mart]
    columns = [field.name for field in msgspec.structs.fields(row)]
    rows = [row(**{name: getattr(record, name) for name in columns}) for record in page.rows]
    return PAGES[mart](rows=rows, cursor=page.cursor)
