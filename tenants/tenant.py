"""A tenant and a caller as values: what the hot path needs to know of the rows, without the rows."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. `tid` is the short opaque id minted with the row and the only form that reaches a Redis key."""

    tid: str
    slug: str
    suspended: bool = False
    payload_bytes: int = 256 * 2**10
    result_bytes: int = 256 * 2**10
    retention_ms: int = 86_400_000
    dead_retention_ms: int = 7 * 86_400_000
    is_idempotency_strict: bool = False
    is_lease_token_required: bool = False


class Role(StrEnum):
    PRODUCER = "producer"
    WORKER = "worker"
    ADMIN = "admin"
    OPERATOR = "operator"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who a verified token speaks for. `expires_at` is a Unix time in seconds."""

    tenant: Tenant
    subject: str
    roles: frozenset[Role]
    scopes: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()
    group: str = ""
    expires_at: float = 0.0

    @property
    def is_authenticated(self) -> bool:
        return True

    def has_command(self, command: str) -> bool:
        return "*" in self.commands or command in self.commands
