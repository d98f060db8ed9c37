"""What the service refuses, as exceptions. `code` is what to switch on; the text says what to do."""

from __future__ import annotations

import msgspec


class CodeqError(Exception):
    """The service said no."""

    def __init__(
        self, status: int, code: str, detail: str, *, request_id: str = "", retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(f"{status} {code}: {detail}" + (f" (request {request_id})" if request_id else ""))
        self.status, self.code, self.detail = status, code, detail
        self.request_id, self.retry_after_seconds = request_id, retry_after_seconds


class NotFound(CodeqError):
    """404: no such task, or not of this tenant."""


class Conflict(CodeqError):
    """409: the task has ended or is somebody else's by now; or an idempotency key stands for another body."""


class TooMany(CodeqError):
    """429: a limit of the tenant. It was tried again already."""


class Unavailable(CodeqError):
    """503, or no answer at all (status 0). It was tried again already."""


class _Problem(msgspec.Struct, rename="camel"):
    code: str = "error"
    detail: str = ""
    request_id: str = ""


_BY_STATUS: dict[int, type[CodeqError]] = {404: NotFound, 409: Conflict, 429: TooMany}
# A proxy in between says these two when it cannot reach the service.
PASSING = frozenset({429, 502, 503, 504})


def of_status(status: int, code: str, detail: str, request_id: str = "", retry_after: str = "") -> CodeqError:
    kind = Unavailable if status in (502, 503, 504) else _BY_STATUS.get(status, CodeqError)
    try:
        seconds = max(0.0, float(retry_after))
    except ValueError:
        seconds = 0.0
    return kind(status, code, detail, request_id=request_id, retry_after_seconds=seconds)


def of_answer(status: int, body: bytes, retry_after: str) -> CodeqError:
    """The error that an answer is; one that is no problem document came from something in between."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, msgspec.ValidationError):
        problem = _Problem(detail="the answer is not codeQ's: is the address right?")
    return of_status(status, problem.code, problem.detail, problem.request_id, retry_after)
