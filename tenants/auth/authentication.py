"""Authentication of API requests by bearer token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.authentication import BaseAuthentication

from core.errors import Unauthenticated
from tenants.auth.verifier import verifier
from tenants.domain import Caller

if TYPE_CHECKING:
    from rest_framework.request import Request


def bearer(header: str | None) -> str:
    """Return the token of an `Authorization` header. Raises Unauthenticated."""
    if header is None or header[:7].lower() != "bearer ":
        raise Unauthenticated()
    token = header[7:].strip()
    if not token:
        raise Unauthenticated()
    return token


class BearerAuthentication(BaseAuthentication):
    """Authenticate by `Authorization: Bearer <jwt>`.

    `allows_suspended` is set for the operations on claimed tasks (heartbeat, result, nack, abandon). A suspended tenant
    may use only these.
    """

    def __init__(self, *, allows_suspended: bool = False) -> None:
        self.allows_suspended = allows_suspended

    def authenticate(self, request: Request) -> tuple[Caller, str]:
        token = bearer(request.META.get("HTTP_AUTHORIZATION"))
        return verifier.verify(token, allows_suspended=self.allows_suspended), token

    async def authenticate_async(self, header: str | None) -> Caller:
        """Like `authenticate`, without blocking the event loop."""
        return await verifier.verify_async(bearer(header), allows_suspended=self.allows_suspended)

    def authenticate_cached(self, header: str | None) -> Caller | None:
        """Return the caller of a cached token. If it returns None, await `authenticate_async`."""
        return verifier.get_cached(bearer(header), allows_suspended=self.allows_suspended)

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"
