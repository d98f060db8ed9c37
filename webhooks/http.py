"""Send one POST request to an address that a tenant chose."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from functools import partial

import msgspec

from core import http_client
from core.conf import conf
from core.http_client import Resolve, Unreachable
from core.url_check import AddressRefused, check_resolved, parse

# The status decides whether an attempt succeeded. The body is only recorded: wait for it no longer than this.
BODY_SECONDS = 2.0


class PostResult(msgspec.Struct, frozen=True):
    """The result of a request.

    `status` is None if there was no response. `error` is empty only after a 2xx response.
    """

    status: int | None
    error: str
    duration_ms: int
    answer: bytes = b""
    retry_after: str = ""

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


async def post(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    deadline_seconds: float | None = None,
    resolve: Resolve | None = None,
    tls: ssl.SSLContext | None = None,
) -> PostResult:
    """Send a body once, and return the result. Raises no error except cancellation."""
    limits = conf().webhooks
    seconds = limits.deadline_seconds if deadline_seconds is None else deadline_seconds
    started = time.monotonic()
    response, error = None, ""
    try:
        target = parse(url)
        response = await http_client.request(
            "POST",
            target,
            headers,
            body,
            check=partial(check_resolved, target),
            deadline_seconds=seconds,
            body_seconds=BODY_SECONDS,
            max_bytes=limits.answer_bytes,
            resolve=resolve,
            tls=tls,
        )
    except AddressRefused as refusal:
        error = f"refused: {refusal}"
    except Unreachable as problem:
        error = str(problem)
    except TimeoutError:
        error = f"no response within {seconds:g} s"
    duration_ms = round((time.monotonic() - started) * 1000)
    if response is None:
        return PostResult(None, error, duration_ms)
    error = "" if 200 <= response.status < 300 else f"HTTP {response.status}"
    return PostResult(response.status, error, duration_ms, response.body, response.retry_after)
