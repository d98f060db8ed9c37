"""Log lines for machines: one JSON object each, whatever is in the message."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import msgspec

_encode = msgspec.json.Encoder(enc_hook=repr).encode


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
