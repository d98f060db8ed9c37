"""The id of the current request: returned in `X-Request-Id` and added to every log line."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar

import uuid_utils

HEADER = b"x-request-id"
_current: ContextVar[str] = ContextVar("codeq_request_id", default="-")
# Any other text could forge a second header or log line. It is replaced, not cleaned.
_is_safe = re.compile(r"[A-Za-z0-9._-]{1,128}").fullmatch


def assign(header: bytes | None) -> str:
    """Return the id of a request: that of its header if it is safe, else a new one.

    Also set it for the log lines of this asyncio task and of the tasks that it starts.
    """
    request_id = "" if header is None else header.decode("latin-1")
    if not _is_safe(request_id):
        request_id = uuid_utils.uuid4().hex
    _current.set(request_id)
    return request_id


def current() -> str:
    return _current.get()


class RequestIdFilter(logging.Filter):
    """Add the request id to log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _current.get()
        return True
