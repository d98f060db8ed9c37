"""The wire types: what a request may say and what an answer says. They are the contract; the schema is made of them.

Unknown fields are refused, a bool is no number, a time has a zone. Of a key that comes twice in one object the last
one counts, as in every JSON library a client is likely to use; inside a payload both are kept.

Here is what several of them say; the structs stand in a module for each noun, as the views do.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import Meta, Struct

from core.conf import conf

LIMITS = conf().queues
# `$` also matches before a last newline, which must not get into a key; no client can say what these refuse.
NO_NEWLINE = r"(?!\n)$"
COMMAND_PATTERN = r"^[A-Za-z0-9_.-]{1,128}" + NO_NEWLINE
UUID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}" + NO_NEWLINE
# PostgreSQL takes no NUL in a text, so one accepted here would stop the audit later.
NO_NUL = r"^[^\x00]*$"
# What `core.url_check` takes, as far as a pattern can say it: visible ASCII, no user, no fragment.
CALLBACK_PATTERN = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?][!\"$-\[\]-~]*)?" + NO_NEWLINE
TEXT_CHARACTERS = 16_384

# JSON has one kind of number: 5 and 5.0 are the same, and some libraries write the second. So what is a whole number to
# us is decoded as any number that is a multiple of 1; the schema says `integer`, which means just that.
Command = Annotated[
    str, Meta(pattern=COMMAND_PATTERN, description="The queue inside the tenant.", examples=["RENDER_VIDEO"])
]
TaskId = Annotated[
    str, Meta(pattern=UUID_PATTERN, description="UUID v7.", examples=["01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"])
]
LeaseToken = Annotated[
    str,
    Meta(min_length=1, max_length=128, pattern=r"^[ -~]+" + NO_NEWLINE, description="The `leaseToken` the claim gave."),
]
Moment = Annotated[dt.datetime, Meta(tz=True)]
Text = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARACTERS, pattern=NO_NUL)]
Cursor = Annotated[str, Meta(min_length=1, max_length=512, description="`cursor` of the page before.")]
Limit = Annotated[int, Meta(ge=1, le=200, description="The most to answer.")]
Words = Annotated[str, Meta(min_length=1, max_length=200, pattern=NO_NUL)]


class Body(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a client sends."""


class View(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """What we answer. Fields without a value are left out."""


class Query(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a query string may say."""
