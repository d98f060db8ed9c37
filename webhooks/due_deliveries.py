"""Due deliveries and their reservation by a sender.

A reservation is a token and an expiry time. If a sender dies, its deliveries are due again when the reservation
expires, under the same id.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from django.db import connection

from core.conf import conf
from webhooks.models import Delivery

# Deliveries to reserve for each slot of a healthy host, so that the next one can start as soon as a slot is free.
RESERVED_PER_SLOT = 4


class ReservedDelivery(msgspec.Struct, frozen=True):
    """A delivery that one sender may attempt until `until`."""

    id: uuid.UUID
    tid: str
    command: str
    url: str
    address: str
    host: str
    body: str
    trace_parent: str
    trace_state: str
    attempts_since_replay: int
    attempts: int
    until: datetime


# `destination` is a recursive skip scan: one index lookup for each (tenant, host) with pending deliveries, so a host
# with a hundred thousand of them costs as much as a host with one. `capacity` is the number of further deliveries that
# may be reserved for each destination. `candidate` numbers the due deliveries of each destination. `chosen` takes the
# first delivery of every destination before any second one, so that a large backlog does not delay other destinations.
RESERVE = """
WITH RECURSIVE destination AS (
    (SELECT tenant_id, host FROM webhooks_delivery WHERE status = 'pending' ORDER BY tenant_id, host LIMIT 1)
    UNION ALL
    SELECT following.tenant_id, following.host FROM destination CROSS JOIN LATERAL (
        SELECT tenant_id, host FROM webhooks_delivery
        WHERE status = 'pending' AND (tenant_id, host) > (destination.tenant_id, destination.host)
        ORDER BY tenant_id, host LIMIT 1
    ) AS following
), capacity AS (
    SELECT destination.tenant_id, destination.host,
        CASE
            WHEN circuit.paused_until > %(now)s THEN 0
            WHEN circuit.failures >= %(threshold)s THEN 1
            WHEN circuit.failures > 0 THEN %(per_host)s
            ELSE %(per_host)s * %(per_slot)s
        END - (
            SELECT count(*) FROM webhooks_delivery AS reserved
            WHERE reserved.tenant_id = destination.tenant_id AND reserved.host = destination.host
              AND reserved.reservation IS NOT NULL AND reserved.status = 'pending' AND reserved.due_at > %(now)s
        ) AS free
    FROM destination LEFT JOIN webhooks_circuit AS circuit USING (tenant_id, host)
), candidate AS (
    SELECT due.id, due.due_at,
        row_number() OVER (PARTITION BY capacity.tenant_id, capacity.host ORDER BY due.due_at) AS ordinal
    FROM capacity CROSS JOIN LATERAL (
        SELECT id, due_at FROM webhooks_delivery
        WHERE status = 'pending' AND tenant_id = capacity.tenant_id AND host = capacity.host AND due_at <= %(now)s
        ORDER BY due_at LIMIT greatest(capacity.free, 0)
    ) AS due
), chosen AS (
    SELECT id FROM webhooks_delivery
    WHERE id IN (SELECT id FROM candidate ORDER BY ordinal, due_at LIMIT %(limit)s)
      AND status = 'pending' AND due_at <= %(now)s
    FOR UPDATE SKIP LOCKED
)
UPDATE webhooks_delivery AS delivery SET reservation = %(token)s, due_at = %(until)s
FROM chosen WHERE delivery.id = chosen.id
RETURNING delivery.id, tenant_id, command, url, address, host, body, trace_parent, trace_state, tries, attempts,
    delivery.due_at
"""


def reserve(token: uuid.UUID, limit: int, now: datetime) -> list[ReservedDelivery]:
    """Reserve due deliveries, at most `limit`."""
    settings = conf().webhooks
    with connection.cursor() as cursor:
        cursor.execute(
            RESERVE,
            {
                "now": now,
                "until": now + reservation_time(),
                "token": token,
                "limit": limit,
                "threshold": settings.failures_to_pause,
                "per_host": settings.slots_per_host,
                "per_slot": RESERVED_PER_SLOT,
            },
        )
        return [ReservedDelivery(*row) for row in cursor.fetchall()]


def reservation_time() -> timedelta:
    """Return how long a reservation lasts; half a minute at the default deadline.

    It lasts for two deadlines and a margin, because a reserved delivery may wait for a slot.
    """
    return timedelta(seconds=2 * conf().webhooks.deadline_seconds + 10)


def release(token: uuid.UUID, ids: Sequence[uuid.UUID], due_at: datetime) -> None:
    """Release reserved deliveries that were not attempted; they are due again at `due_at`."""
    Delivery.objects.filter(pk__in=ids, reservation=token, status=Delivery.Status.PENDING).update(
        reservation=None, due_at=due_at
    )
