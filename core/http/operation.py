"""An operation: one method of one path, declared once above its handler.

The declaration names the roles that may call the operation, the types that it reads and answers, and its errors. The
dispatch (`core.http.api_view`) enforces the declaration and the schema is generated from it, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
from django.conf import settings
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string
from msgspec import Struct
from rest_framework.permissions import BasePermission

from core import errors

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[HttpResponseBase]])
# A struct, a media type, both, or nothing.
Answer = type[Struct] | str | tuple[str, type[Struct]] | None


class Authenticator(Protocol):
    """The class that the setting `API_AUTHENTICATION` names, as the dispatch uses it."""

    def authenticate_cached(self, header: str | None) -> Any: ...

    async def authenticate_async(self, header: str | None) -> Any: ...


@dataclass(frozen=True)
class Operation:
    """`@Operation("claim", …)`: the handler's docstring is the description in the schema."""

    name: str
    _: KW_ONLY
    tag: str
    summary: str
    answers: Mapping[int, Answer]
    may: Sequence[type[BasePermission]] = ()
    errors: Sequence[type[errors.CodeqError]] = ()
    body: type[Struct] | None = None
    is_body_optional: bool = False
    query: type[Struct] | None = None
    # Headers that are read and sent, beside those of every operation: name -> what it says.
    headers: Mapping[str, str] = field(default_factory=dict)
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    # Which of the tenant's rates it counts against; None: none, or its own script counts it.
    rate: str | None = None
    # A verb that ends claimed work is open to a suspended tenant too.
    is_finishing: bool = False
    # Answers anybody: no token is looked at.
    is_open: bool = False

    def __call__(self, handler: Handler) -> Handler:
        handler.operation = self  # type: ignore[attr-defined]
        return handler

    @cached_property
    def permissions(self) -> list[BasePermission]:
        return [permission() for permission in self.may]

    @cached_property
    def authenticator(self) -> Authenticator:
        authenticator: Authenticator = import_string(settings.API_AUTHENTICATION)(is_finishing=self.is_finishing)
        return authenticator

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[Struct] | None:
        return None if self.body is None else msgspec.json.Decoder(self.body)

    def read(self, body: bytes) -> Struct:
        """What the body says."""
        assert self.decoder is not None
        if not body:
            if not self.is_body_optional:
                raise errors.InvalidRequest("The body is missing.")
            body = b"{}"
        return self.decoder.decode(body)
