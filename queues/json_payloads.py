"""Payloads and results: compact JSON whose numbers stay as they were written."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from core import errors

# Many JSON libraries of workers fail on deeper nesting.
MAX_DEPTH = 100


def compact(raw: Raw, field: str) -> bytes:
    """Return raw JSON of a request as compact UTF-8 text.

    Raises InvalidRequest for null, for invalid UTF-8, and for nesting that many JSON libraries cannot read. The decoder
    of the request has already checked the syntax, including escapes and surrogates.
    """
    try:
        text = msgspec.json.format(raw, indent=-1)
        text.decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest(f"Not valid UTF-8 - at `$.{field}`") from error
    if text == b"null":
        raise errors.InvalidRequest(f"Expected a value, got `null` - at `$.{field}`")
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_deeper(text, MAX_DEPTH):
        raise errors.InvalidRequest(f"Nested deeper than {MAX_DEPTH} levels - at `$.{field}`")
    return text


_remove_non_brackets = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\[\]{}"]+').sub
_CURLY_TO_SQUARE = bytes.maketrans(b"{}", b"[]")


def _is_deeper(text: bytes, levels: int) -> bool:
    """Return whether valid JSON nests deeper than `levels`.

    Each step removes the innermost brackets.
    """
    brackets = _remove_non_brackets(b"", text).translate(_CURLY_TO_SQUARE)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
