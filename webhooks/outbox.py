"""The deliveries that are due, reserved for one sender at a time.

A reservation is a moment in the future and a token. A sender that dies leaves both behind: when the moment has come
the delivery is due again, under the same id.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from django.db import connection

from core.conf import conf
from webhooks.models import Delivery

# How many deliveries of a healthy host are reserved for each that can be under way: the next is at hand at once.
AHEAD = 4


class Reserved(msgspec.Struct, frozen=True):
    """A delivery that is ours to try, until `until`."""

    id: uuid.UUID
    tid: str
    command: str
    url: str
    address: str
    host: str
    body: str
    trace_parent: str
    trace_state: str
    tries: int
    attempts: int
    until: datetime


# One walk over the index gives every (tenant, host) that has something pending, however much it has: a host with a
# hundred thousand deliveries waiting costs as much as one with a single one. Each then gives what it has room for,
# in turns, so that none stands in front of another.
RESERVE = """
WITH RECURSIVE lane AS (
    (SELECT tenant_id, host FROM webhooks_delivery WHERE status = 'pending' ORDER BY tenant_id, host LIMIT 1)
    UNION ALL
    SELECT following.tenant_id, following.host FROM lane CROSS JOIN LATERAL (
        SELECT tenant_id, host FROM webhooks_delivery
        WHERE status = 'pending' AND (tenant_id, host) > (lane.tenant_id, lane.host)
        ORDER BY tenant_id, host LIMIT 1
    ) AS following
), room AS (
    SELECT lane.tenant_id, lane.host,
        CASE
            WHEN circuit.paused_until > %(now)s THEN 0
            WHEN circuit.failures >= %(threshold)s THEN 1
            WHEN circuit.failures > 0 THEN %(per_host)s
            ELSE %(per_host)s * %(ahead)s
        END - (
            SELECT count(*) FROM webhooks_delivery AS taken
            WHERE taken.tenant_id = lane.tenant_id AND taken.host = lane.host AND taken.reservation IS NOT NULL
              AND taken.status = 'pending' AND taken.due_at > %(now)s
        ) AS free
    FROM lane LEFT JOIN webhooks_circuit AS circuit USING (tenant_id, host)
), candidate AS (
    SELECT due.id, due.due_at, row_number() OVER (PARTITION BY room.tenant_id, room.host ORDER BY due.due_at) AS turn
    FROM room CROSS JOIN LATERAL (
        SELECT id, due_at FROM webhooks_delivery
        WHERE status = 'pending' AND tenant_id = room.tenant_id AND host = room.host AND due_at <= %(now)s
        ORDER BY due_at LIMIT greatest(room.free, 0)
    ) AS due
), chosen AS (
    SELECT id FROM webhooks_delivery
    WHERE id IN (SELECT id FROM candidate ORDER BY turn, due_at LIMIT %(limit)s)
      AND status = 'pending' AND due_at <= %(now)s
    FOR UPDATE SKIP LOCKED
)
UPDATE webhooks_delivery AS delivery SET reservation = %(token)s, due_at = %(until)s
FROM chosen WHERE delivery.id = chosen.id
RETURNING delivery.id, tenant_id, command, url, address, host, body, trace_parent, trace_state, tries, attempts,
    delivery.due_at
"""


def reserve(token: uuid.UUID, limit: int, now: datetime) -> list[Reserved]:
    """Take deliveries that are due, at most `limit`."""
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
                "ahead": AHEAD,
            },
        )
        return [Reserved(*row) for row in cursor.fetchall()]


def reservation_time() -> timedelta:
    """Long enough for those reserved ahead; at the default deadline half a minute."""
    return timedelta(seconds=2 * conf().webhooks.deadline_seconds + 10)


def release(token: uuid.UUID, ids: Sequence[uuid.UUID], due_at: datetime) -> None:
    """Give back what was reserved and not begun."""
    Delivery.objects.filter(pk__in=ids, reservation=token, status=Delivery.Status.PENDING).update(
        reservation=None, due_at=due_at
    )
