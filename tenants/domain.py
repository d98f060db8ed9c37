"""Immutable values for requests: a tenant's snapshot, the caller, its roles and scopes."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rate limits of a tenant, per second; 0 means no limit.

    They limit the tasks created, the claims, the admin requests and the callbacks sent.
    """

    create: float = 0
    claim: float = 0
    admin: float = 0
    webhook: float = 0


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's row as last read, with the installation's defaults for empty limits.

    `tid` is the short random id created with the row. Redis keys contain the `tid` only, never the slug.
    """

    tid: str
    slug: str
    is_suspended: bool = False
    payload_bytes: int = 256 * 2**10
    result_bytes: int = 256 * 2**10
    depth: int = 0  # limit of waiting tasks in all queues of the tenant; 0 means no limit
    rates: Rates = Rates()
    retention_ms: int = 86_400_000
    dead_retention_ms: int = 7 * 86_400_000
    is_idempotency_strict: bool = False
    is_lease_token_required: bool = False


class CallerRole(StrEnum):
    """A role that a token grants in the API."""

    PRODUCER = "producer"
    WORKER = "worker"
    ADMIN = "admin"
    OPERATOR = "operator"


# All scopes of a worker's token, one for each operation of a worker.
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
    """The tenant, identity and permissions of a verified token.

    `fingerprint` is a short hash of the token, for rate limits by token. `expires_at` is a Unix time in seconds.
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
