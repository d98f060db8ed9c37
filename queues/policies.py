"""Policies of queues, which override the defaults of the installation and the tenant.

The row in PostgreSQL is authoritative. Services read default attempts, priorities and retention from the tenant cache,
which follows a change within about two seconds. Scripts read backoff, consumer limit and dead letter queue from Redis.
These three are written to Redis with each change, and again every minute by beat, in case Redis was down or has lost
its data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from core import errors
from core.conf import BackoffPolicy, conf
from core.redis.connections import reachable_tenants
from queues import validation
from queues.current_engine import engine
from queues.engine import admin_commands
from queues.engine.keys import COMMAND, PRIORITIES
from queues.models import QueuePolicy
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot

MAX_CONSUMERS = 100_000
MIN_RETENTION_SECONDS = 60
MAX_RETENTION_SECONDS = 10 * 366 * 86_400
MAX_POLICIES = 1_000  # per tenant: the tenant cache holds all of them


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a queue's policy. None and '' stand for the default."""

    max_attempts: int | None = None
    priority_tiers: tuple[int, ...] | None = None
    retention_seconds: int | None = None
    max_consumers: int | None = None
    dead_letter_topic: str = ""
    backoff: str = ""
    backoff_base_seconds: float | None = None
    backoff_cap_seconds: float | None = None


Policies = Mapping[str, Policy]
NO_POLICIES: Policies = {}


def for_tenant(tenant: TenantSnapshot) -> Policies:
    """Return the policies of a tenant's queues by command, from the tenant cache."""
    cached: Policies | None = tenant_cache.get_related("policies", tenant)
    return NO_POLICIES if cached is None else cached


def find(tenant: TenantSnapshot, command: str) -> QueuePolicy:
    """Return the policy of a queue. Raises NotFound if it has no policy."""
    # PostgreSQL rejects a text with a NUL, so only a valid name is looked up.
    is_name = COMMAND.fullmatch(command) is not None
    row = QueuePolicy.objects.filter(tenant_id=tenant.tid, command=command).first() if is_name else None
    if row is None:
        raise errors.NotFound("This topic has no policy. Use PUT to create one.")
    return row


def list_rows(tenant: TenantSnapshot) -> QuerySet[QueuePolicy]:
    """Return the policies of a tenant's queues, in the order of the queues' names."""
    return QueuePolicy.objects.filter(tenant_id=tenant.tid).order_by("command")


def put(tenant: TenantSnapshot, command: str, policy: Policy, *, actor: str) -> tuple[QueuePolicy, bool]:
    """Replace the policy of a queue. Returns the row, and whether it is new.

    The version increases with every change. Raises InvalidRequest for a value that is not allowed, and Conflict if the
    tenant has too many policies.
    """
    check(command, policy)
    values = msgspec.structs.asdict(policy)
    tiers = policy.priority_tiers
    values["priority_tiers"] = None if tiers is None else sorted(tiers)
    try:
        with transaction.atomic():
            rows = QueuePolicy.objects.select_for_update()
            row = rows.filter(tenant_id=tenant.tid, command=command).first()
            is_new = row is None
            if row is None:
                if list_rows(tenant).count() >= MAX_POLICIES:
                    raise errors.Conflict(f"A tenant may have at most {MAX_POLICIES} policies. Delete one first.")
                row = QueuePolicy.objects.create(tenant_id=tenant.tid, command=command, changed_by=actor, **values)
            elif any(getattr(row, name) != value for name, value in values.items()):
                for name, value in values.items():
                    setattr(row, name, value)
                row.version += 1
                row.changed_by = actor
                row.save()
    except IntegrityError:
        # A concurrent request has created the policy. Update it.
        if not QueuePolicy.objects.filter(tenant_id=tenant.tid, command=command).exists():
            raise
        return put(tenant, command, policy, actor=actor)
    write_to_redis(row)
    tenant_cache.refresh([tenant.tid])
    return row, is_new


def delete(tenant: TenantSnapshot, command: str) -> None:
    """Delete the policy of a queue; the defaults apply again.

    Its tasks stay. Raises NotFound if there is no policy.
    """
    row = find(tenant, command)
    # Redis first: beat restores the values of a row that is still there, but nothing removes values without a row.
    admin_commands.set_policy(engine(), tenant.tid, command, policy="", max_consumers=None).run_sync()
    row.delete()
    tenant_cache.refresh([tenant.tid])


def write_to_redis(row: QueuePolicy) -> None:
    """Write to Redis the values that scripts read there."""
    queues = conf().queues
    has_retry_override = bool(
        row.backoff or row.backoff_base_seconds is not None or row.backoff_cap_seconds is not None
        or row.dead_letter_topic
    )  # fmt: skip
    base = queues.backoff_base_seconds if row.backoff_base_seconds is None else row.backoff_base_seconds
    cap = queues.backoff_cap_seconds if row.backoff_cap_seconds is None else row.backoff_cap_seconds
    retry_policy = (
        f"{row.backoff or queues.backoff} {round(base * 1000)} {round(cap * 1000)} {row.dead_letter_topic}".rstrip()
    )
    admin_commands.set_policy(
        engine(),
        str(row.tenant_id),
        row.command,
        policy=retry_policy if has_retry_override else "",
        max_consumers=row.max_consumers,
        dead_letter_queue=row.dead_letter_topic,
    ).run_sync()


def sync(may_continue: Callable[[], bool]) -> int:
    """Write every policy to Redis again. Returns the number of policies written."""
    written = 0
    tids = QueuePolicy.objects.order_by().values_list("tenant_id", flat=True).distinct()
    reachable = set(reachable_tenants(map(str, tids)))
    for row in QueuePolicy.objects.order_by("pk").iterator(chunk_size=500):
        if not may_continue():
            break
        if str(row.tenant_id) in reachable:
            write_to_redis(row)
            written += 1
    return written


def check(command: str, policy: Policy) -> None:
    """Raise InvalidRequest for a value that is not allowed.

    The API and the console both depend on this check.
    """
    limits = conf().queues
    validation.check_command(command, "name")
    attempts, tiers, retention, consumers = (
        policy.max_attempts, policy.priority_tiers, policy.retention_seconds, policy.max_consumers,
    )  # fmt: skip
    validation.require(
        attempts is None or 1 <= attempts <= limits.max_attempts_limit,
        f"maxAttempts: must be 1 to {limits.max_attempts_limit}",
    )
    validation.require(
        tiers is None or (bool(tiers) and len(set(tiers)) == len(tiers) and set(tiers) <= set(PRIORITIES)),
        "priorityTiers: must be a list of different priorities from 0 to 9",
    )
    validation.require(
        retention is None or MIN_RETENTION_SECONDS <= retention <= MAX_RETENTION_SECONDS,
        f"retentionSeconds: must be {MIN_RETENTION_SECONDS} to {MAX_RETENTION_SECONDS}",
    )
    validation.require(
        consumers is None or 1 <= consumers <= MAX_CONSUMERS, f"maxConsumers: must be 1 to {MAX_CONSUMERS}"
    )
    topic, backoffs = policy.dead_letter_topic, get_args(BackoffPolicy)
    validation.require(
        not topic or bool(COMMAND.fullmatch(topic)),
        "deadLetterTopicRef: must be 1 to 128 characters of A-Z a-z 0-9 _ . -",
    )
    validation.require(topic != command, "deadLetterTopicRef: must differ from this topic")
    validation.require(
        not policy.backoff or policy.backoff in backoffs, f"backoff: must be one of {', '.join(backoffs)}"
    )
    for name, seconds in (
        ("backoffBaseSeconds", policy.backoff_base_seconds),
        ("backoffCapSeconds", policy.backoff_cap_seconds),
    ):
        validation.require(
            seconds is None or 0 <= seconds <= limits.max_schedule_ahead_seconds,
            f"{name}: must be 0 to {limits.max_schedule_ahead_seconds}",
        )


def load(tids: list[str]) -> dict[str, Any]:
    """Load the policies of some tenants for the tenant cache."""
    by_tenant: dict[str, dict[str, Policy]] = defaultdict(dict)
    for row in QueuePolicy.objects.filter(tenant_id__in=tids):
        by_tenant[str(row.tenant_id)][row.command] = from_row(row)
    return dict(by_tenant)


def from_row(row: QueuePolicy) -> Policy:
    """Return the values of a policy's row."""
    return Policy(
        max_attempts=row.max_attempts,
        priority_tiers=None if row.priority_tiers is None else tuple(row.priority_tiers),
        retention_seconds=row.retention_seconds,
        max_consumers=row.max_consumers,
        dead_letter_topic=row.dead_letter_topic,
        backoff=row.backoff,
        backoff_base_seconds=row.backoff_base_seconds,
        backoff_cap_seconds=row.backoff_cap_seconds,
    )


def max_attempts(policies: Policies) -> dict[str, int]:
    """Return the default number of attempts of each queue whose policy sets it."""
    return {command: policy.max_attempts for command, policy in policies.items() if policy.max_attempts}


def retentions_ms(policies: Policies) -> dict[str, int]:
    """Return the retention of each queue whose policy sets it."""
    return {
        command: policy.retention_seconds * 1000 for command, policy in policies.items() if policy.retention_seconds
    }  # fmt: skip
