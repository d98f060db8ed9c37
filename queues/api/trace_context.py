"""W3C trace context as a request brings it (https://www.w3.org/TR/trace-context/). Malformed is the same as absent."""

from __future__ import annotations

import re

from core.http.handler import ApiRequest

_parent = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
_state = re.compile(r"[\x20-\x7e]{1,512}").fullmatch


def context(request: ApiRequest) -> tuple[str | None, str | None]:
    """`traceparent` and `tracestate`, to be stored with a task; both None unless the first one is right."""
    parent = request.header(b"traceparent")
    if parent is None or not _parent(parent):
        return None, None
    state = request.header(b"tracestate")
    return parent, state if state is not None and _state(state) else None
