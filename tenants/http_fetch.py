"""Fetch a JSON document with one GET request.

A deadline bounds the whole request and a limit bounds the body, regardless of how the server behaves.
"""

from __future__ import annotations

import asyncio
import ipaddress
from urllib.parse import urlsplit

import msgspec

from core import http_client
from core.url_check import Address, AddressRefused, UrlTarget, check_operator_addresses

DEADLINE_SECONDS = 3.0
MAX_BYTES = 256 * 2**10


class FetchError(ValueError):
    """The server's response is not a usable JSON document, or there is no response."""


def is_url(url: str) -> bool:
    """Whether this is an http or https URL with a host.

    Spaces and control characters are refused: a line break could inject a request header.
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        return False


def fetch_json(url: str, *, deadline_seconds: float = DEADLINE_SECONDS, max_bytes: int = MAX_BYTES) -> object:
    """Return the JSON document at a URL from the settings or entered by a superuser.

    Blocks and runs an event loop of its own, so call it in a thread without one. The server may be in a private
    network. Follows no redirect, accepts no compression, and reads at most `max_bytes` before the deadline. Raises
    FetchError, which is a ValueError.
    """
    if not is_url(url):
        raise FetchError("not an http(s) URL")
    try:
        response = asyncio.run(
            http_client.request(
                "GET",
                _parse_target(url),
                {"Accept": "application/json", "Accept-Encoding": "identity"},
                check=check_operator_addresses,
                deadline_seconds=deadline_seconds,
                max_bytes=max_bytes + 1,
            )
        )
    except (AddressRefused, http_client.Unreachable) as error:
        raise FetchError(str(error)) from error
    except TimeoutError as error:
        raise FetchError("the deadline has passed") from error
    if response.status != 200:
        raise FetchError(f"the server responded with status {response.status}")
    if len(response.body) > max_bytes:
        raise FetchError(f"the document is larger than {max_bytes} bytes")
    if not response.is_complete:
        raise FetchError("the response ended early, or the deadline has passed")
    try:
        return msgspec.json.decode(response.body)
    except (ValueError, RecursionError) as error:
        raise FetchError("the document is not JSON") from error


def _parse_target(url: str) -> UrlTarget:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not host.isascii():
        host = host.encode("idna").decode("ascii")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        literal: Address | None = ipaddress.ip_address(host)
    except ValueError:
        literal = None
    return UrlTarget(parts.scheme, host, port, path, literal)
