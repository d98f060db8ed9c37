"""Exceptions for error responses.

Branch on `code`; the text says what happened and what to do.
"""

from __future__ import annotations

import msgspec


class CodeqError(Exception):
    """The service refused a request, or did not respond."""

    def __init__(
        self, status: int, code: str, detail: str, *, request_id: str = "", retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(f"{status} {code}: {detail}" + (f" (request {request_id})" if request_id else ""))
        self.status, self.code, self.detail = status, code, detail
        self.request_id, self.retry_after_seconds = request_id, retry_after_seconds


class NotFound(CodeqError):
    """404: the tenant has no such task."""


class Conflict(CodeqError):
    """409: the task has ended, the lease is lost, or the idempotency key has another body."""


class TooMany(CodeqError):
    """429: a limit of the tenant was reached.

    The client has already retried, unless `retry_after_seconds` is too long to wait.
    """


class Unavailable(CodeqError):
    """502, 503, 504, or no response (status 0).

    The client has already retried, unless `retry_after_seconds` is too long to wait.
    """


class _Problem(msgspec.Struct, rename="camel"):
    code: str = "error"
    detail: str = ""
    request_id: str = ""


_BY_STATUS: dict[int, type[CodeqError]] = {404: NotFound, 409: Conflict, 429: TooMany}
# Statuses worth a retry. A proxy answers 502 or 504 when it cannot reach the service.
RETRYABLE = frozenset({429, 502, 503, 504})


def from_status(status: int, code: str, detail: str, request_id: str = "", retry_after: str = "") -> CodeqError:
    """Build the exception for a status; an invalid `retry_after` counts as 0."""
    kind = Unavailable if status in (502, 503, 504) else _BY_STATUS.get(status, CodeqError)
    try:
        seconds = max(0.0, float(retry_after))
    except ValueError:
        seconds = 0.0
    return kind(status, code, detail, request_id=request_id, retry_after_seconds=seconds)


def from_response(status: int, body: bytes, retry_after: str) -> CodeqError:
    """Build the exception for an error response.

    A response without a problem document comes from a proxy or another server.
    """
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, msgspec.ValidationError):
        problem = _Problem(detail="The response does not come from codeQ. Check the base URL.")
    return from_status(status, problem.code, problem.detail, problem.request_id, retry_after)
