"""The base class of API views: REST framework's, with a shorter, asynchronous dispatch.

The operations of a view are declared above their handlers (`core.http.operation`) and enforced here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, update_wrapper
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import msgspec
from django.conf import settings
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string
from rest_framework.views import APIView

from core import errors, metrics, problem_details
from core.conf import conf
from core.http.handler import ApiRequest, ApiResponse
from core.http.openapi import ApiSchema
from core.http.operation import Operation

METHODS = ("get", "post", "put", "delete")
# No route has more query fields. A query with more is a mistake or an attack on the parser.
MAX_QUERY_FIELDS = 20

encode = msgspec.json.Encoder().encode


@cache
def rate_limiter() -> Callable[..., Awaitable[None]]:
    """Return the function that the setting `API_RATE_LIMITER` names.

    It counts a request of a tenant, or raises TooMany.
    """
    limiter: Callable[..., Awaitable[None]] = import_string(settings.API_RATE_LIMITER)
    return limiter


def json_response(value: msgspec.Struct, status: int = 200) -> ApiResponse:
    """Return a response with the value as its JSON body."""
    return ApiResponse(encode(value), status)


def no_content() -> ApiResponse:
    """Return an empty 204 response."""
    return ApiResponse(b"", 204)


class ApiView(APIView):
    """Authenticate, check permissions, decode the body and call the handler of an operation.

    Every exception becomes a problem document.
    """

    schema = ApiSchema()
    operations: ClassVar[dict[str, tuple[Operation, Callable[..., Awaitable[HttpResponseBase]]]]] = {}
    allow: ClassVar[str] = ""
    # The schemas of path parameters that only this view has.
    path_schemas: ClassVar[dict[str, dict[str, Any]]] = {}

    request: ApiRequest  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.operations = {}
        for method in METHODS:
            handler = getattr(cls, method, None)
            if handler is not None:
                cls.operations[method.upper()] = (handler.operation, handler)
        if "GET" in cls.operations:
            cls.operations["HEAD"] = cls.operations["GET"]
        cls.allow = ", ".join([*cls.operations, "OPTIONS"])

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        """Return the view function, without DRF's wrappers for CSRF checks and forms."""

        def view(request: ApiRequest, **arguments: Any) -> Awaitable[HttpResponseBase]:
            self = cls(**initkwargs)
            self.request = request
            return self.dispatch(request, **arguments)

        return update_wrapper(view, super().as_view(**initkwargs))

    async def dispatch(self, request: ApiRequest, **arguments: Any) -> HttpResponseBase:  # type: ignore[override]
        try:
            declaration = self.operations.get(request.method)
            if declaration is None:
                return self._respond_without_operation(request)
            operation, handler = declaration
            if operation.is_open:
                return await handler(self)
            header = request.header(b"authorization")
            caller = operation.authenticator.authenticate_cached(header)
            if caller is None:
                caller = await operation.authenticator.authenticate_async(header)
            request.user = request.auth = caller
            for permission in operation.permissions:
                if not permission.has_permission(request, self):  # type: ignore[arg-type]
                    raise errors.Forbidden(getattr(permission, "message", None))
            if operation.rate is not None and (per_second := getattr(caller.tenant.rates, operation.rate)):
                await rate_limiter()(caller.tenant, operation.rate, per_second, token_fingerprint=caller.fingerprint)
            if operation.query is not None:
                arguments["query"] = read_query(request.scope["query_string"], operation.query)
            if operation.decoder is not None:
                content_type = request.raw_headers.get(b"content-type")
                if content_type != b"application/json" and not request.is_body_read:
                    check_content_type(content_type)
                body = await request.read_body(conf().web.body_bytes)
                arguments["body"] = operation.decode_body(body)
            return await handler(self, caller, **arguments)
        except Exception as error:  # noqa: BLE001 - becomes a problem document; unexpected errors are logged there
            response = self.handle_exception(error)
            # Break the reference cycle between the error and its frame, so that a large body is freed immediately.
            error.__traceback__ = None
            return response

    def handle_exception(self, error: Exception) -> HttpResponse:  # type: ignore[override]
        if isinstance(error, errors.TooMany):
            metrics.rate_limit_hits.labels(self.operations[self.request.method][0].name).inc()
        return problem_details.problem_response(error)

    def _respond_without_operation(self, request: ApiRequest) -> HttpResponse:
        """Respond to OPTIONS, and with a 405 to a method that has no operation."""
        response: HttpResponse
        if request.method == "OPTIONS":
            response = no_content()
        else:
            response = problem_details.problem_response(
                errors.MethodNotAllowed(f"Method not allowed. Allowed: {self.allow}.")
            )
        response.headers["Allow"] = self.allow
        return response


def check_content_type(value: bytes | None) -> None:
    """Raise UnsupportedMediaType unless the content type is JSON in UTF-8.

    A site in a browser could send other content types to this API without a preflight request.
    """
    kind, _, parameters = (value or b"").partition(b";")
    charset = parameters.strip().lower().replace(b'"', b"").replace(b" ", b"")
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        raise errors.UnsupportedMediaType


def read_query(query_string: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Return the query as a struct.

    A repeated field is an error, because a proxy might have checked only one of its values.
    """
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            encoding="utf-8",
            errors="strict",
            max_num_fields=MAX_QUERY_FIELDS,
        )
    except ValueError as error:
        raise errors.InvalidRequest("The query string is invalid.") from error
    values = dict(pairs)
    if len(values) != len(pairs):
        raise errors.InvalidRequest("A field appears twice in the query.")
    return msgspec.convert(values, kind, strict=False)
