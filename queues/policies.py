"""Policies: what holds in one queue where it is not what holds everywhere. Rows, a snapshot, and what scripts know.

A row is the truth. What services need of it (default attempts, priorities, retention) comes with the tenant from its
directory, two seconds after a change at most; what scripts need (backoff, consumers, the queue that takes the dead) is
written to Redis with the change, and again by beat, so that a Redis that was away or empty has it a minute later.
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

CONSUMERS_LIMIT = 100_000
RETENTION_LIMIT = 10 * 366 * 86_400
POLICIES = 1_000  # of one tenant: they travel with it


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue's policy says; None and '' is what holds everywhere."""

    max_attempts: int | None = None
    priority_tiers: tuple[int, ...] | None = None
    retention_seconds: int | None = None
    max_consumers: int | None = None
    dead_letter_topic: str = ""
    backoff: str = ""
    backoff_base_seconds: float | None = None
    backoff_cap_seconds: float | None = None


Policies = Mapping[str, Policy]
NONE: Policies = {}


def of(tenant: TenantSnapshot) -> Policies:
    """The policies of a tenant's queues, by command: from the snapshot, for the hot path."""
    found: Policies | None = tenant_cache.get_related("policies", tenant)
    return NONE if found is None else found


def find(tenant: TenantSnapshot, command: str) -> QueuePolicy:
    """The row. NotFound where there is none."""
    # What cannot be a name is not asked for: PostgreSQL would stumble over a NUL in it.
    is_name = COMMAND.fullmatch(command) is not None
    row = QueuePolicy.objects.filter(tenant_id=tenant.tid, command=command).first() if is_name else None
    if row is None:
        raise errors.NotFound("This topic has no policy.")
    return row


def listed(tenant: TenantSnapshot) -> QuerySet[QueuePolicy]:
    return QueuePolicy.objects.filter(tenant_id=tenant.tid).order_by("command")


def put(tenant: TenantSnapshot, command: str, policy: Policy, *, actor: str) -> tuple[QueuePolicy, bool]:
    """Have this policy, and nothing of the one before, hold for a queue: the row, and whether it is new.

    The version grows with every change, and with nothing else. InvalidRequest says what is wrong with it.
    """
    check(command, policy)
    wanted = msgspec.structs.asdict(policy)
    tiers = policy.priority_tiers
    wanted["priority_tiers"] = None if tiers is None else sorted(tiers)
    try:
        with transaction.atomic():
            rows = QueuePolicy.objects.select_for_update()
            row = rows.filter(tenant_id=tenant.tid, command=command).first()
            is_new = row is None
            if row is None:
                if listed(tenant).count() >= POLICIES:
                    raise errors.Conflict(f"A tenant may have {POLICIES} policies.")
                row = QueuePolicy.objects.create(tenant_id=tenant.tid, command=command, changed_by=actor, **wanted)
            elif any(getattr(row, name) != value for name, value in wanted.items()):
                for name, value in wanted.items():
                    setattr(row, name, value)
                row.version += 1
                row.changed_by = actor
                row.save()
    except IntegrityError:
        # Two made it at once: the other one is there now, and this is a change of it.
        if not QueuePolicy.objects.filter(tenant_id=tenant.tid, command=command).exists():
            raise
        return put(tenant, command, policy, actor=actor)
    tell(row)
    tenant_cache.refresh([tenant.tid])
    return row, is_new


def delete(tenant: TenantSnapshot, command: str) -> None:
    """Have what holds everywhere hold for a queue again. Its tasks stay. NotFound where there is no policy."""
    row = find(tenant, command)
    # First: a row without its words in Redis gets them again from beat, but nobody would look for words without a row.
    admin_commands.set_policy(engine(), tenant.tid, command, policy="", max_consumers=None).run_sync()
    row.delete()
    tenant_cache.refresh([tenant.tid])


def tell(row: QueuePolicy) -> None:
    """Tell Redis what its scripts need to know."""
    queues = conf().queues
    has_line = bool(
        row.backoff or row.backoff_base_seconds is not None or row.backoff_cap_seconds is not None
        or row.dead_letter_topic
    )  # fmt: skip
    base = queues.backoff_base_seconds if row.backoff_base_seconds is None else row.backoff_base_seconds
    cap = queues.backoff_cap_seconds if row.backoff_cap_seconds is None else row.backoff_cap_seconds
    line = f"{row.backoff or queues.backoff} {round(base * 1000)} {round(cap * 1000)} {row.dead_letter_topic}".rstrip()
    admin_commands.set_policy(
        engine(),
        str(row.tenant_id),
        row.command,
        policy=line if has_line else "",
        max_consumers=row.max_consumers,
        dead_letter_queue=row.dead_letter_topic,
    ).run_sync()


def sync(may_go_on: Callable[[], bool]) -> int:
    """Tell Redis of every policy; how many there are."""
    told = 0
    tids = QueuePolicy.objects.order_by().values_list("tenant_id", flat=True).distinct()
    there = set(reachable_tenants(map(str, tids)))
    for row in QueuePolicy.objects.order_by("pk").iterator(chunk_size=500):
        if not may_go_on():
            break
        if str(row.tenant_id) in there:
            tell(row)
            told += 1
    return told


def check(command: str, policy: Policy) -> None:
    """InvalidRequest for what cannot hold."""
    limits = conf().queues
    validation.check_command(command, "name")
    most, tiers, keep, busy = (
        policy.max_attempts, policy.priority_tiers, policy.retention_seconds, policy.max_consumers,
    )  # fmt: skip
    validation.require(
        most is None or 1 <= most <= limits.max_attempts_limit, f"maxAttempts: 1 to {limits.max_attempts_limit}"
    )
    validation.require(
        tiers is None or (bool(tiers) and len(set(tiers)) == len(tiers) and set(tiers) <= set(PRIORITIES)),
        "priorityTiers: different priorities, 0 to 9",
    )
    validation.require(keep is None or 60 <= keep <= RETENTION_LIMIT, f"retentionSeconds: 60 to {RETENTION_LIMIT}")
    validation.require(busy is None or 1 <= busy <= CONSUMERS_LIMIT, f"maxConsumers: 1 to {CONSUMERS_LIMIT}")
    topic = policy.dead_letter_topic
    validation.require(not topic or bool(COMMAND.fullmatch(topic)), "deadLetterTopicRef: not the name of a topic")
    validation.require(topic != command, "deadLetterTopicRef: another topic than this one")
    validation.require(
        not policy.backoff or policy.backoff in get_args(BackoffPolicy), "backoff: not one of the policies"
    )
    for name, seconds in (
        ("backoffBaseSeconds", policy.backoff_base_seconds),
        ("backoffCapSeconds", policy.backoff_cap_seconds),
    ):
        validation.require(
            seconds is None or 0 <= seconds <= limits.max_schedule_ahead_seconds,
            f"{name}: 0 to {limits.max_schedule_ahead_seconds}",
        )


def load(tids: list[str]) -> dict[str, Any]:
    """For the directory: the policies of these tenants."""
    found: dict[str, dict[str, Policy]] = defaultdict(dict)
    for row in QueuePolicy.objects.filter(tenant_id__in=tids):
        found[str(row.tenant_id)][row.command] = value_of(row)
    return dict(found)


def value_of(row: QueuePolicy) -> Policy:
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


def max_attempts(found: Policies) -> dict[str, int]:
    """Attempts of tasks that name none, where a queue says so."""
    return {command: policy.max_attempts for command, policy in found.items() if policy.max_attempts}


def retentions_ms(found: Policies) -> dict[str, int]:
    """How long ended tasks stay, where a queue says so."""
    return {
        command: policy.retention_seconds * 1000 for command, policy in found.items() if policy.retention_seconds
    }  # fmt: skip
