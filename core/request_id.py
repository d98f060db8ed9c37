"""The id of the request that is being served: taken from `X-Request-Id` or minted, sent back, and on every log line."""

from __future__ import annotations

import logging
import os
import re
from contextvars import ContextVar

HEADER = b"x-request-id"
_current: ContextVar[str] = ContextVar("codeq_request_id", default="-")
# Anything else could forge a second header or a second log line; it is replaced, not cleaned.
_is_safe = re.compile(r"[A-Za-z0-9._-]{1,128}").fullmatch


def choose(sent: bytes | None) -> str:
    """The id to use for a request whose header said `sent`."""
    if sent is not None:
        text = sent.decode("latin-1")
        if _is_safe(text):
            return text
    return os.urandom(16).hex()


def current() -> str:
    return _current.get()


def set_current(request_id: str) -> None:
    """From here on, in this task and what it starts, log lines carry `request_id`."""
    _current.set(request_id)


class RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _current.get()
        return True
