"""What came of the tries: kept, and learnt from. A report counts if its reservation still stands; a success always."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec
from django.db import connection, transaction

from core.conf import conf
from queues.audit.events import text
from tenants.models import Tenant
from webhooks.http import Posted
from webhooks.models import Delivery, DeliveryAttempt, Endpoint
from webhooks.outbox import Reserved
from webhooks.schedule import Step, Verdict

ANSWER_BYTES = 2048


class Finished(msgspec.Struct, frozen=True):
    """One try of a reserved delivery, and what follows from it."""

    delivery: Reserved
    started_at: datetime
    posted: Posted
    step: Step


OUTCOME = {
    Verdict.DELIVERED: Delivery.Status.DELIVERED,
    Verdict.RETRY: Delivery.Status.PENDING,
    Verdict.GIVEN_UP: Delivery.Status.GIVEN_UP,
    Verdict.GONE: Delivery.Status.HELD,
}


@transaction.atomic
def record(token: uuid.UUID, finished: Sequence[Finished], now: datetime) -> None:
    """Keep what came of these tries, and learn from it about their hosts and endpoints."""
    if not finished:
        return
    _record_attempts(finished)
    _record_deliveries(token, finished, now)
    _record_circuits(finished, now)
    _record_endpoints(finished, now)


def _record_attempts(finished: Sequence[Finished]) -> None:
    DeliveryAttempt.objects.bulk_create(
        DeliveryAttempt(
            delivery_id=item.delivery.id,
            number=item.delivery.attempts + 1,
            started_at=item.started_at,
            duration_ms=item.posted.duration_ms,
            status_code=item.posted.status,
            error=text(item.posted.error),
            answer=text(item.posted.answer[:ANSWER_BYTES]),
        )
        for item in finished
    )


def _record_deliveries(token: uuid.UUID, finished: Sequence[Finished], now: datetime) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE webhooks_delivery AS delivery SET status = new.status, tries = delivery.tries + 1,"
            "  attempts = delivery.attempts + 1, due_at = coalesce(new.due_at, %s), reservation = NULL,"
            "  last_status = new.last_status, last_error = new.last_error,"
            "  ended_at = CASE WHEN new.status = 'pending' THEN NULL ELSE %s END"
            " FROM unnest(%s::uuid[], %s::text[], %s::timestamptz[], %s::int[], %s::text[])"
            "  AS new (id, status, due_at, last_status, last_error)"
            " WHERE delivery.id = new.id"
            "  AND (delivery.reservation = %s OR (new.status = 'delivered' AND delivery.status <> 'delivered'))",
            [
                now,
                now,
                [item.delivery.id for item in finished],
                [OUTCOME[item.step.verdict].value for item in finished],
                [item.step.due_at for item in finished],
                [item.posted.status for item in finished],
                [text(item.posted.error) for item in finished],
                token,
            ],
        )


def _record_circuits(finished: Sequence[Finished], now: datetime) -> None:
    """Whoever answered is alive, whatever the answer; silence, 429 and 5xx are counted."""
    silent: dict[tuple[str, str], int] = {}
    alive = set()
    for item in finished:
        lane = (item.delivery.tid, item.delivery.host)
        status = item.posted.status
        if status is None or status == 429 or status >= 500:
            silent[lane] = silent.get(lane, 0) + 1
        else:
            alive.add(lane)
    settings = conf().webhooks
    with connection.cursor() as cursor:
        if alive:
            cursor.execute(
                "DELETE FROM webhooks_circuit"
                " WHERE (tenant_id, host) IN (SELECT * FROM unnest(%s::text[], %s::text[]))",
                _columns(alive),
            )
        down = {lane: count for lane, count in silent.items() if lane not in alive}
        if down:
            cursor.execute(
                "INSERT INTO webhooks_circuit AS circuit (tenant_id, host, failures, paused_until, updated_at)"
                " SELECT new.tid, new.host, new.failures,"
                "  CASE WHEN new.failures >= %(limit)s THEN %(probe)s::timestamptz END, %(now)s"
                " FROM unnest(%(tids)s::text[], %(hosts)s::text[], %(counts)s::int[]) AS new (tid, host, failures)"
                " JOIN tenants_tenant ON tenants_tenant.tid = new.tid"
                " ON CONFLICT (tenant_id, host) DO UPDATE SET failures = circuit.failures + excluded.failures,"
                "  updated_at = excluded.updated_at, paused_until ="
                "  CASE WHEN circuit.failures + excluded.failures >= %(limit)s THEN %(probe)s::timestamptz END",
                {
                    "tids": [tid for tid, _ in down],
                    "hosts": [host for _, host in down],
                    "counts": list(down.values()),
                    "limit": settings.failures_to_pause,
                    "probe": now + timedelta(seconds=settings.probe_seconds),
                    "now": now,
                },
            )


def _record_endpoints(finished: Sequence[Finished], now: datetime) -> None:
    """Since when an endpoint fails, once its quick tries are over; and those that asked never to be called again."""
    well, failing, gone = set(), set(), set()
    for item in finished:
        endpoint = (item.delivery.tid, item.delivery.address)
        if item.step.verdict is Verdict.DELIVERED:
            well.add(endpoint)
        elif item.step.verdict is Verdict.GONE:
            gone.add(endpoint)
        elif item.delivery.tries + 1 >= conf().webhooks.tries:
            failing.add(endpoint)
    with connection.cursor() as cursor:
        if well:
            cursor.execute(
                "UPDATE webhooks_endpoint SET failing_since = NULL WHERE failing_since IS NOT NULL"
                " AND (tenant_id, address) IN (SELECT * FROM unnest(%s::text[], %s::text[]))",
                _columns(well),
            )
    for tid, address in (failing | gone) - well:
        _note_failing(tid, address, now)
    for tid, address in gone:
        disable(tid, address, "it answered 410 Gone", now)


def _note_failing(tid: str, address: str, now: datetime) -> None:
    known = Endpoint.objects.filter(tenant_id=tid, address=address)
    if not known.filter(failing_since=None).update(failing_since=now) and Tenant.objects.filter(pk=tid).exists():
        row = Endpoint(tenant_id=tid, address=address, failing_since=now)
        Endpoint.objects.bulk_create([row], ignore_conflicts=True)


def disable(tid: str, address: str, because: str, now: datetime) -> int:
    """Call an endpoint no more. What is pending for it is held, to be replayed when it is enabled; how many."""
    Endpoint.objects.filter(tenant_id=tid, address=address, is_enabled=True).update(
        is_enabled=False, disabled_at=now, disabled_because=because
    )
    return Delivery.objects.filter(tenant_id=tid, address=address, status=Delivery.Status.PENDING).update(
        status=Delivery.Status.HELD, reservation=None, ended_at=now
    )


def _columns(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    rows = sorted(pairs)
    return [[first for first, _ in rows], [second for _, second in rows]]
