"""Payloads and results: compact JSON whose numbers stay as they were written."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from core import errors

# Many JSON libraries of workers fail on deeper nesting.
MAX_DEPTH = 100


def compact(raw: Raw, field: str) -> bytes:
    """Return a decoded value as compact UTF-8 text.

    Raises InvalidRequest for JSON that some readers reject. The decoder has checked the syntax, including escapes and
    surrogates. It checks neither the bytes of a string nor the depth.
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


_not_brackets = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\[\]{}"]+').sub
_to_square = bytes.maketrans(b"{}", b"[]")


def _is_deeper(text: bytes, levels: int) -> bool:
    """Return whether valid JSON nests deeper than `levels`.

    Each step removes the innermost brackets.
    """
    brackets = _not_brackets(b"", text).translate(_to_square)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
