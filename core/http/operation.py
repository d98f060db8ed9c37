"""An operation: one method of one path, declared once above its handler.

The declaration names the permissions that the operation requires, the types of its request and its responses, and its
errors. The dispatch (`core.http.api_view`) enforces the declaration and the schema is generated from it, so they cannot
differ.
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
# The body of a response: a struct, which is sent as JSON; a media type; both; or no body.
Answer = type[Struct] | str | tuple[str, type[Struct]] | None


class Authenticator(Protocol):
    """The methods that the class in the setting `API_AUTHENTICATION` must have."""

    def authenticate_cached(self, header: str | None) -> Any: ...

    async def authenticate_async(self, header: str | None) -> Any: ...


@dataclass(frozen=True)
class Operation:
    """A declaration: `@Operation("claim", …)` above a handler.

    The docstring of the handler is the description in the schema.
    """

    name: str
    _: KW_ONLY
    tag: str
    summary: str
    answers: Mapping[int, Answer]
    permission_classes: Sequence[type[BasePermission]] = ()
    errors: Sequence[type[errors.CodeqError]] = ()
    body: type[Struct] | None = None
    is_body_optional: bool = False
    query: type[Struct] | None = None
    # Request and response headers in addition to those of every operation: name -> description.
    headers: Mapping[str, str] = field(default_factory=dict)
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    # The field of the tenant's `Rates` that limits requests. None: there is no limit, or the operation's script
    # applies it.
    rate: str | None = None
    # The operation concerns claimed tasks, so suspended tenants may use it.
    allows_suspended: bool = False
    # The operation needs no token.
    is_open: bool = False

    def __call__(self, handler: Handler) -> Handler:
        handler.operation = self  # type: ignore[attr-defined]
        return handler

    @cached_property
    def permissions(self) -> list[BasePermission]:
        return [permission() for permission in self.permission_classes]

    @cached_property
    def authenticator(self) -> Authenticator:
        authenticator_class = import_string(settings.API_AUTHENTICATION)
        authenticator: Authenticator = authenticator_class(allows_suspended=self.allows_suspended)
        return authenticator

    @cached_property
    def decoder(self) -> msgspec.json.Decoder[Struct] | None:
        return None if self.body is None else msgspec.json.Decoder(self.body)

    def decode_body(self, body: bytes) -> Struct:
        """Decode the body. Raises InvalidRequest or msgspec's errors."""
        assert self.decoder is not None
        if not body:
            if not self.is_body_optional:
                raise errors.InvalidRequest("The request has no body. Send a JSON object.")
            body = b"{}"
        return self.decoder.decode(body)
