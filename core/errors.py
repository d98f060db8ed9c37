"""The errors that codeQ raises deliberately: one class for each.

The docstring is the default message. `code` is the stable word that clients compare, `status` the HTTP status, and
`retryable` says whether the same request may succeed later. Nothing in the project matches an error by its text.
"""

from __future__ import annotations

from typing import ClassVar


class CodeqError(Exception):
    """An unexpected error occurred. Report the requestId to the operator; the log has the cause."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str | None = None, *, retry_after_seconds: float | None = None) -> None:
        self.detail = detail or (type(self).__doc__ or "").strip()
        self.retry_after_seconds = retry_after_seconds
        super().__init__(self.detail)


class InvalidRequest(CodeqError):
    """The request is not valid. Correct the field that the detail names."""

    code = "invalid_request"
    status = 400


class PayloadTooLarge(InvalidRequest):
    """The request is too large. Send a smaller body, payload or result."""

    code = "payload_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    """The media type is not supported. Send application/json in UTF-8, uncompressed."""

    code = "unsupported_media_type"
    status = 415


class MethodNotAllowed(InvalidRequest):
    """Method not allowed. The Allow header lists the methods of this path."""

    code = "method_not_allowed"
    status = 405


class RequestTimeout(InvalidRequest):
    """The request body did not arrive in time. Send a smaller body or check the connection."""

    code = "request_timeout"
    status = 408


class Unauthenticated(CodeqError):
    """The token is missing, expired or not valid. Send `Authorization: Bearer <jwt>`."""

    code = "unauthenticated"
    status = 401


class Forbidden(CodeqError):
    """The token does not permit this request. Use one with the required role, scope or command."""

    code = "forbidden"
    status = 403


class TenantSuspended(Forbidden):
    """The tenant is suspended. Ask the operator to lift the suspension."""

    code = "tenant_suspended"


class NotLeaseOwner(Forbidden):
    """Another worker holds the lease. Stop working on the task."""

    code = "not_owner"


class NotFound(CodeqError):
    """Not found. Check the path and the id."""

    code = "not_found"
    status = 404


class TaskNotFound(NotFound):
    """task not found"""  # The contract fixes this text.

    code = "task_not_found"


class ResultNotFound(NotFound):
    """result not found"""  # The contract fixes this text.

    code = "result_not_found"


class Conflict(CodeqError):
    """The task's state does not permit this request. Read the task before you try again."""

    code = "conflict"
    status = 409


class LeaseLost(Conflict):
    """The lease has ended: it expired, the task was returned, or the task has ended. Stop working on it."""

    code = "lease_lost"


class TaskCancelled(Conflict):
    """The task was cancelled. Stop working on it."""

    code = "cancelled"


class AlreadyEnded(Conflict):
    """The task has already ended with a different outcome. Read its result."""

    code = "already_ended"


class IdempotencyMismatch(Conflict):
    """The idempotency key was used for a different request. Use a new key."""

    code = "idempotency_mismatch"


class NotDead(Conflict):
    """The task is not a dead letter. Only dead letters can be replayed or deleted."""

    code = "not_dead"


class TooMany(CodeqError):
    """The rate limit is reached. Wait for Retry-After and try again."""

    code = "too_many_requests"
    status = 429
    retryable = True


class QueueFull(TooMany):
    """The tenant has too many waiting tasks. Try again when workers have completed some."""

    code = "queue_full"


class Unavailable(CodeqError):
    """The service is temporarily unavailable. Wait for Retry-After and try again."""

    code = "unavailable"
    status = 503
    retryable = True


class StoreFull(Unavailable):
    """The queue's memory is full. Try again later; workers can still complete their tasks."""

    code = "store_full"


class ConfigError(Exception):
    """The configuration is not valid. The message names the setting and a valid value."""
