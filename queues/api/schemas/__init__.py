"""The structs of requests and responses. The OpenAPI document is generated from them.

Requests with unknown fields, a boolean instead of a number, or a time without a zone are refused. If a key occurs twice
in one object, the last one counts, as in most JSON libraries. Inside a payload both are kept.

This module has the types that several structs share. The structs of each noun are in their own module, like its views.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import Meta, Struct

from core.conf import conf

LIMITS = conf().queues
# `$` also matches before a final newline, which must not become part of a Redis key.
NO_NEWLINE = r"(?!\n)$"
COMMAND_PATTERN = r"^[A-Za-z0-9_.-]{1,128}" + NO_NEWLINE
UUID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}" + NO_NEWLINE
# PostgreSQL rejects a NUL in a text that is stored or searched.
NO_NUL = r"^[^\x00]*$"
# The URLs that `core.url_check` accepts, as far as a pattern can express it: visible ASCII, no user, no fragment.
CALLBACK_PATTERN = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?][!\"$-\[\]-~]*)?" + NO_NEWLINE
TEXT_CHARACTERS = 16_384

# Whole numbers in the structs are floats with `multiple_of=1`, because JSON does not distinguish 5 from 5.0, and some
# libraries write 5.0. The OpenAPI document calls them `integer`, which means the same.
Command = Annotated[
    str,
    Meta(
        pattern=COMMAND_PATTERN,
        description="The name of the queue. Each tenant has its own queues.",
        examples=["RENDER_VIDEO"],
    ),
]
TaskId = Annotated[
    str,
    Meta(
        pattern=UUID_PATTERN,
        description="The id of the task, a UUID version 7.",
        examples=["01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"],
    ),
]
LeaseToken = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=128,
        pattern=r"^[ -~]+" + NO_NEWLINE,
        description="The `leaseToken` that the claim returned.",
    ),
]
Moment = Annotated[dt.datetime, Meta(tz=True)]
Text = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARACTERS, pattern=NO_NUL)]
Cursor = Annotated[
    str,
    Meta(min_length=1, max_length=512, description="The `cursor` of the previous page. Omit it for the first page."),
]
Limit = Annotated[int, Meta(ge=1, le=200, description="Maximum number of items in the page.")]
Words = Annotated[str, Meta(min_length=1, max_length=200, pattern=NO_NUL)]


class RequestBody(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base class of request bodies."""


class ResponseBody(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """Base class of response bodies. Fields without a value are left out."""


class QueryParameters(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base class of query strings."""
