"""What every route of the API is: a view of Django REST framework whose dispatch is asynchronous and does only what
a JSON API needs.

What its operations are is declared above their handlers (`core.http.operation`), and enforced here.
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
# More than any route knows; a query with more is a mistake or an attack on the parser.
QUERY_FIELDS = 20

encode = msgspec.json.Encoder().encode


@cache
def rate_limiter() -> Callable[..., Awaitable[None]]:
    """Return the function that the setting `API_RATE_LIMITER` names: it counts a request, or raises TooMany."""
    limiter: Callable[..., Awaitable[None]] = import_string(settings.API_RATE_LIMITER)
    return limiter


def json_response(value: msgspec.Struct, status: int = 200) -> ApiResponse:
    return ApiResponse(encode(value), status)


def no_content() -> ApiResponse:
    return ApiResponse(b"", 204)


class ApiView(APIView):
    """Authenticates, checks rights, reads, calls the handler; whatever is raised becomes a problem document."""

    schema = ApiSchema()
    operations: ClassVar[dict[str, tuple[Operation, Callable[..., Awaitable[HttpResponseBase]]]]] = {}
    allow: ClassVar[str] = ""
    # What the schema says of this path's own parameters.
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
    def as_view(cls, **said: Any) -> Any:
        """What Django and the schema look at, without the two layers that would look after cookies and forms."""

        def view(request: ApiRequest, **arguments: Any) -> Awaitable[HttpResponseBase]:
            self = cls(**said)
            self.request = request
            return self.dispatch(request, **arguments)

        return update_wrapper(view, super().as_view(**said))

    async def dispatch(self, request: ApiRequest, **arguments: Any) -> HttpResponseBase:  # type: ignore[override]
        try:
            found = self.operations.get(request.method)
            if found is None:
                return self._other_method(request)
            declared, handler = found
            if declared.is_open:
                return await handler(self)
            header = request.header(b"authorization")
            caller = declared.authenticator.authenticate_cached(header)
            if caller is None:
                caller = await declared.authenticator.authenticate_async(header)
            request.user = request.auth = caller
            for permission in declared.permissions:
                if not permission.has_permission(request, self):  # type: ignore[arg-type]
                    raise errors.Forbidden(getattr(permission, "message", None))
            if declared.rate is not None and (per_second := getattr(caller.tenant.rates, declared.rate)):
                await rate_limiter()(caller.tenant, declared.rate, per_second, by=caller.fingerprint)
            if declared.query is not None:
                arguments["query"] = read_query(request.scope["query_string"], declared.query)
            if declared.decoder is not None:
                content_type = request.received.get(b"content-type")
                if content_type != b"application/json" and not request.is_body_read:
                    check_content_type(content_type)
                body = await request.read_body(conf().web.body_bytes)
                arguments["body"] = declared.read(body)
            return await handler(self, caller, **arguments)
        except Exception as error:  # noqa: BLE001 - becomes a problem document; what is unexpected is logged there
            answer = self.handle_exception(error)
            # An error that was an item's answer is a local of the frame that raised it: a ring, which would keep the
            # request's body, of megabytes, until the collector comes by, and in a web process it comes seldom.
            error.__traceback__ = None
            return answer

    def handle_exception(self, error: Exception) -> HttpResponse:  # type: ignore[override]
        if isinstance(error, errors.TooMany):
            metrics.rate_limit_hits.labels(self.operations[self.request.method][0].name).inc()
        return problem_details.problem_response(error)

    def _other_method(self, request: ApiRequest) -> HttpResponse:
        response: HttpResponse
        if request.method == "OPTIONS":
            response = no_content()
        else:
            response = problem_details.problem_response(errors.MethodNotAllowed(f"This path knows {self.allow}."))
        response.headers["Allow"] = self.allow
        return response


def check_content_type(value: bytes | None) -> None:
    """JSON is UTF-8 and nothing else; a page in a browser can send other types across sites without being asked."""
    kind, _, parameters = (value or b"").partition(b";")
    charset = parameters.strip().lower().replace(b'"', b"").replace(b" ", b"")
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        raise errors.UnsupportedMediaType


def read_query(query_string: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """The query as a struct; a field that comes twice is refused, as a proxy might go by the other one."""
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            encoding="utf-8",
            errors="strict",
            max_num_fields=QUERY_FIELDS,
        )
    except ValueError as error:
        raise errors.InvalidRequest("The query cannot be read.") from error
    values = dict(pairs)
    if len(values) != len(pairs):
        raise errors.InvalidRequest("A field comes twice in the query.")
    return msgspec.convert(values, kind, strict=False)
