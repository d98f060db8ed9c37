"""Everything that can go wrong on purpose, one class each.

The docstring is the default message, `code` the stable word a client switches on, `status` the HTTP status,
`retryable` whether the same request may succeed later. Nothing in the project matches an error by its text.
"""

from __future__ import annotations

from typing import ClassVar


class CodeqError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str | None = None, *, retry_after_seconds: float | None = None) -> None:
        self.detail = detail or (type(self).__doc__ or "").strip()
        self.retry_after_seconds = retry_after_seconds
        super().__init__(self.detail)


class InvalidRequest(CodeqError):
    """The request does not follow the contract."""

    code = "invalid_request"
    status = 400


class PayloadTooLarge(InvalidRequest):
    """The request is larger than this tenant may send."""

    code = "payload_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    """Send the body as application/json in UTF-8, uncompressed."""

    code = "unsupported_media_type"
    status = 415


class MethodNotAllowed(InvalidRequest):
    """This path does not know that method."""

    code = "method_not_allowed"
    status = 405


class RequestTimeout(InvalidRequest):
    """The body did not arrive in time."""

    code = "request_timeout"
    status = 408


class Unauthenticated(CodeqError):
    """Send a valid bearer token: `Authorization: Bearer <jwt>`."""

    code = "unauthenticated"
    status = 401


class Forbidden(CodeqError):
    """The token does not allow this."""

    code = "forbidden"
    status = 403


class TenantSuspended(Forbidden):
    """This tenant is suspended."""

    code = "tenant_suspended"


class NotLeaseOwner(Forbidden):
    """The task is leased to another worker."""

    code = "not_owner"


class NotFound(CodeqError):
    """There is nothing here."""

    code = "not_found"
    status = 404


class TaskNotFound(NotFound):
    """task not found"""

    code = "task_not_found"


class ResultNotFound(NotFound):
    """result not found"""

    code = "result_not_found"


class Conflict(CodeqError):
    """The task's state does not allow this."""

    code = "conflict"
    status = 409


class LeaseLost(Conflict):
    """The lease is over: the task was given back, taken by somebody else, or has ended."""

    code = "lease_lost"


class TaskCancelled(Conflict):
    """cancelled"""

    code = "cancelled"


class AlreadyEnded(Conflict):
    """The task has already ended, with another outcome."""

    code = "already_ended"


class IdempotencyMismatch(Conflict):
    """This idempotency key was used for a different request."""

    code = "idempotency_mismatch"


class NotDead(Conflict):
    """Only a dead letter can be replayed."""

    code = "not_dead"


class TooMany(CodeqError):
    """Too many requests: slow down."""

    code = "too_many_requests"
    status = 429
    retryable = True


class QueueFull(TooMany):
    """As many tasks wait as this tenant may have waiting: let workers catch up."""

    code = "queue_full"


class Unavailable(CodeqError):
    """The queue cannot answer right now: try again shortly."""

    code = "unavailable"
    status = 503
    retryable = True


class StoreFull(Unavailable):
    """The queue's memory is full. Workers can finish their tasks; new ones are refused until there is room."""

    code = "store_full"


class ConfigError(Exception):
    """The configuration is wrong; the message names the setting and what to write instead."""
