"""Log lines: for machines one JSON object each, whatever is in the message; brief where strangers cause them."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import msgspec

_encode = msgspec.json.Encoder(enc_hook=repr).encode


# Of what Django says of a request that it refuses: the request's own words are in it.
CLIENT_ERROR_CHARS = 300


class ClientErrorFilter(logging.Filter):
    """What Django refuses (a host that is not ours, a forged form) is a line, and no error of ours with its traceback.

    Anybody causes it: 60 KB of a header were 240 KB of log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("django.security."):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = record.getMessage()[:CLIENT_ERROR_CHARS], None
            record.exc_info = record.exc_text = None
        return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().encode("utf-8", "backslashreplace").decode(),
            "requestId": getattr(record, "request_id", "-"),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode()
