"""Log formatting: one JSON object a line, and short lines for errors that clients cause."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import msgspec

_encode = msgspec.json.Encoder(enc_hook=repr).encode


# Django's messages about rejected requests contain text of the client. They are cut to this length.
CLIENT_ERROR_CHARS = 300


class ClientErrorFilter(logging.Filter):
    """Shorten the records about requests that Django rejects to warnings without a traceback.

    Any client can cause them with an unknown host or a forged form: a header of 60 KB once wrote 240 KB of log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("django.security."):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = record.getMessage()[:CLIENT_ERROR_CHARS], None
            record.exc_info = record.exc_text = None
        return True


class JsonFormatter(logging.Formatter):
    """Format each record as one JSON object. Characters that UTF-8 cannot encode are escaped."""

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
