"""A tenant and a caller as values: what the hot path needs to know of the rows, without the rows."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second a tenant may make, by what they do. 0 = as many as it likes."""

    create: float = 0
    claim: float = 0
    admin: float = 0
    webhook: float = 0


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. `tid` is the short opaque id minted with the row: all that reaches a Redis key."""

    tid: str
    slug: str
    suspended: bool = False
    payload_bytes: int = 256 * 2**10
    result_bytes: int = 256 * 2**10
    depth: int = 0  # tasks that may wait in the tenant's queues; 0 = as many as fit
    rates: Rates = Rates()
    retention_ms: int = 86_400_000
    dead_retention_ms: int = 7 * 86_400_000
    is_idempotency_strict: bool = False
    is_lease_token_required: bool = False


class CallerRole(StrEnum):
    PRODUCER = "producer"
    WORKER = "worker"
    ADMIN = "admin"
    OPERATOR = "operator"


# Every scope a worker's token can have, one for each thing a worker does.
WORKER_SCOPES = (
    "codeq:claim",
    "codeq:heartbeat",
    "codeq:abandon",
    "codeq:nack",
    "codeq:result",
    "codeq:subscribe",
)
ADMIN_SCOPE = "codeq:admin"
OPERATOR_SCOPE = "codeq:operator"
ANY_COMMAND = "*"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who a verified token speaks for. `expires_at` is a Unix time in seconds.

    `fingerprint` tells two tokens of one tenant apart (a rate limit's key) without being the token.
    """

    tenant: TenantSnapshot
    subject: str
    roles: frozenset[CallerRole]
    scopes: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()
    group: str = ""
    fingerprint: str = ""
    expires_at: float = 0.0

    @property
    def is_authenticated(self) -> bool:
        return True
