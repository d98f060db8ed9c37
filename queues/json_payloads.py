"""Payloads and results: JSON that is passed on and never looked into, compact, every number as it was written."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from core import errors

# What a worker's JSON library can be trusted with.
DEPTH = 100


def compact(raw: Raw, field: str) -> bytes:
    """A decoded value as compact UTF-8 text. InvalidRequest for what no JSON reader could take.

    The decoder has checked the syntax by now, escapes and surrogates among it; it looks neither at the bytes of a
    string nor at the depth, which decides whether a worker's JSON library survives the payload.
    """
    try:
        text = msgspec.json.format(raw, indent=-1)
        text.decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest(f"Not valid UTF-8 - at `$.{field}`") from error
    if text == b"null":
        raise errors.InvalidRequest(f"Expected a value, got `null` - at `$.{field}`")
    if text.count(b"[") + text.count(b"{") > DEPTH and _is_deeper(text, DEPTH):
        raise errors.InvalidRequest(f"Nested deeper than {DEPTH} levels - at `$.{field}`")
    return text


_not_brackets = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\[\]{}"]+').sub
_to_square = bytes.maketrans(b"{}", b"[]")


def _is_deeper(text: bytes, levels: int) -> bool:
    """Whether valid JSON nests deeper than `levels`. The innermost brackets go, again and again."""
    brackets = _not_brackets(b"", text).translate(_to_square)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
