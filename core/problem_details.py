"""Problem documents (RFC 9457): the one place where an exception becomes an HTTP response."""

from __future__ import annotations

import logging
import math
from typing import Annotated, Any

import msgspec
import redis.exceptions
from django.core.exceptions import RequestAborted
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpResponse
from msgspec import Meta
from rest_framework import exceptions as drf

from core import errors, metrics, request_id
from core.errors import CodeqError

log = logging.getLogger("codeq.web")

MEDIA_TYPE = "application/problem+json"
# `detail` may repeat text of the client, such as the name of an unknown field. It is cut to this length.
DETAIL_CHARACTERS = 400


class Problem(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A problem. `error` repeats `code` for clients of the original codeQ API."""

    type: Annotated[str, Meta(description="URI of the kind of problem.", examples=["urn:codeq:error:task_not_found"])]
    title: Annotated[str, Meta(description="Summary of the kind of problem. It does not depend on the request.")]
    status: Annotated[int, Meta(ge=400, le=599, description="The HTTP status.")]
    code: Annotated[str, Meta(description="Stable error code, for programs.", examples=["task_not_found"])]
    error: Annotated[str, Meta(description="The same text as `code`.")]
    detail: Annotated[str, Meta(description="Description of this problem.")]
    request_id: Annotated[str, Meta(description="The `X-Request-Id` of this request.")]
    retry_after_seconds: Annotated[int | None, Meta(description="Seconds to wait before the next try.")] = None


def from_exception(error: BaseException) -> CodeqError:
    """Return the CodeqError for an exception.

    An unexpected exception is logged here, and the client gets no details of it.
    """
    if isinstance(error, CodeqError):
        return error
    if isinstance(error, msgspec.MsgspecError):
        return errors.InvalidRequest(_clip(str(error)))
    if isinstance(error, UnicodeDecodeError):
        return errors.InvalidRequest("The body is not valid UTF-8.")
    if isinstance(error, RecursionError):
        return errors.InvalidRequest("The body is nested too deeply.")
    # Redis may have executed the command even if its answer timed out.
    if isinstance(error, (redis.exceptions.RedisError, TimeoutError, ConnectionError)):
        log.warning("a server did not answer: %s", type(error).__name__)
        return errors.Unavailable(retry_after_seconds=1)
    if isinstance(error, (OperationalError, InterfaceError)):
        # PostgreSQL is down. Enqueue, claim and submit work without it.
        log.warning("the database did not answer: %s", type(error).__name__)
        return errors.Unavailable("The database does not answer. Try again in a few seconds.", retry_after_seconds=5)
    if isinstance(error, drf.APIException):
        return _from_rest_framework(error)
    if isinstance(error, Http404):
        return errors.NotFound()
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return CodeqError()


def _from_rest_framework(error: drf.APIException) -> CodeqError:
    if isinstance(error, (drf.NotAuthenticated, drf.AuthenticationFailed)):
        return errors.Unauthenticated()
    if isinstance(error, drf.PermissionDenied):
        return errors.Forbidden(_clip(str(error.detail)))
    if isinstance(error, drf.NotFound):
        return errors.NotFound()
    if isinstance(error, drf.MethodNotAllowed):
        return errors.MethodNotAllowed()
    if isinstance(error, drf.UnsupportedMediaType):
        return errors.UnsupportedMediaType()
    if isinstance(error, drf.Throttled):
        return errors.TooMany(retry_after_seconds=getattr(error, "wait", None))
    return errors.InvalidRequest(_clip(str(error.detail)))


def _clip(text: str) -> str:
    return text if len(text) <= DETAIL_CHARACTERS else text[:DETAIL_CHARACTERS] + "…"


def describe(error: CodeqError) -> Problem:
    """Return the problem document of an error."""
    retry_after: int | None = None
    # Without a time to wait, all clients would retry at once.
    if error.status in (429, 503) or error.retry_after_seconds is not None:
        retry_after = max(1, math.ceil(error.retry_after_seconds or 1))
    return Problem(
        type=f"urn:codeq:error:{error.code}",
        title=(type(error).__doc__ or "").strip(),
        status=error.status,
        code=error.code,
        error=error.code,
        detail=error.detail,
        request_id=request_id.current(),
        retry_after_seconds=retry_after,
    )


def problem_response(error: BaseException) -> HttpResponse:
    """Return the response for an exception that was raised while a request was served."""
    if isinstance(error, RequestAborted):
        raise error
    known = from_exception(error)
    problem = describe(known)
    metrics.http_errors.labels(known.status, known.code).inc()
    response = HttpResponse(msgspec.json.encode(problem), status=known.status, content_type=MEDIA_TYPE)
    if problem.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(problem.retry_after_seconds)
    if known.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def exception_handler(error: Exception, context: dict[str, Any]) -> HttpResponse:
    """Handle exceptions of DRF's own views (`REST_FRAMEWORK["EXCEPTION_HANDLER"]`)."""
    return problem_response(error)
