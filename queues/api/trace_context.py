"""The W3C trace context of a request (https://www.w3.org/TR/trace-context/).

A malformed header counts as absent.
"""

from __future__ import annotations

import re

from core.http.handler import ApiRequest

_parent = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
_state = re.compile(r"[\x20-\x7e]{1,512}").fullmatch


def from_request(request: ApiRequest) -> tuple[str | None, str | None]:
    """Return `traceparent` and `tracestate`, to store with a task.

    Without a valid `traceparent` both are None.
    """
    parent = request.header(b"traceparent")
    if parent is None or not _parent(parent):
        return None, None
    state = request.header(b"tracestate")
    return parent, state if state is not None and _state(state) else None
