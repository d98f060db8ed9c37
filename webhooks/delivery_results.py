"""Record the results of delivery attempts, and update circuits and endpoints from them.

A failed attempt changes its delivery only if the sender's reservation is still in its row; a successful attempt always
does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec
from django.db import connection, transaction

from core.conf import conf
from queues.audit.events import storable_text
from tenants.models import Tenant
from webhooks.due_deliveries import ReservedDelivery
from webhooks.http import PostResult
from webhooks.models import Delivery, DeliveryAttempt, Endpoint
from webhooks.retry_schedule import RetryDecision, Verdict

ANSWER_BYTES = 2048


class DeliveryResult(msgspec.Struct, frozen=True):
    """A finished attempt of a reserved delivery, and the decision whether to retry it."""

    delivery: ReservedDelivery
    started_at: datetime
    posted: PostResult
    decision: RetryDecision


STATUS_AFTER = {
    Verdict.DELIVERED: Delivery.Status.DELIVERED,
    Verdict.RETRY: Delivery.Status.PENDING,
    Verdict.GIVEN_UP: Delivery.Status.GIVEN_UP,
    Verdict.GONE: Delivery.Status.HELD,
}


@transaction.atomic
def record(token: uuid.UUID, results: Sequence[DeliveryResult], now: datetime) -> None:
    """Store the results, and update the circuits and endpoints that they concern."""
    if not results:
        return
    _record_attempts(results)
    _record_deliveries(token, results, now)
    _record_circuits(results, now)
    _record_endpoints(results, now)


def _record_attempts(results: Sequence[DeliveryResult]) -> None:
    DeliveryAttempt.objects.bulk_create(
        DeliveryAttempt(
            delivery_id=result.delivery.id,
            number=result.delivery.attempts + 1,
            started_at=result.started_at,
            duration_ms=result.posted.duration_ms,
            status_code=result.posted.status,
            error=storable_text(result.posted.error),
            answer=storable_text(result.posted.answer[:ANSWER_BYTES]),
        )
        for result in results
    )


def _record_deliveries(token: uuid.UUID, results: Sequence[DeliveryResult], now: datetime) -> None:
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
                [result.delivery.id for result in results],
                [STATUS_AFTER[result.decision.verdict].value for result in results],
                [result.decision.due_at for result in results],
                [result.posted.status for result in results],
                [storable_text(result.posted.error) for result in results],
                token,
            ],
        )


def _record_circuits(results: Sequence[DeliveryResult], now: datetime) -> None:
    """Count the consecutive failures of each host.

    A failure is no response, 429 or 5xx. Any other response deletes the circuit.
    """
    failures: dict[tuple[str, str], int] = {}
    responding = set()
    for result in results:
        tenant_host = (result.delivery.tid, result.delivery.host)
        status = result.posted.status
        if status is None or status == 429 or status >= 500:
            failures[tenant_host] = failures.get(tenant_host, 0) + 1
        else:
            responding.add(tenant_host)
    settings = conf().webhooks
    with connection.cursor() as cursor:
        if responding:
            cursor.execute(
                "DELETE FROM webhooks_circuit"
                " WHERE (tenant_id, host) IN (SELECT * FROM unnest(%s::text[], %s::text[]))",
                _columns(responding),
            )
        failing = {tenant_host: count for tenant_host, count in failures.items() if tenant_host not in responding}
        if failing:
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
                    "tids": [tid for tid, _ in failing],
                    "hosts": [host for _, host in failing],
                    "counts": list(failing.values()),
                    "limit": settings.failures_to_pause,
                    "probe": now + timedelta(seconds=settings.probe_seconds),
                    "now": now,
                },
            )


def _record_endpoints(results: Sequence[DeliveryResult], now: datetime) -> None:
    """Record when endpoints began to fail, and disable endpoints that answered 410.

    An endpoint counts as failing when a delivery has used up its quick attempts.
    """
    succeeded, failing, removed = set(), set(), set()
    for result in results:
        endpoint = (result.delivery.tid, result.delivery.address)
        if result.decision.verdict is Verdict.DELIVERED:
            succeeded.add(endpoint)
        elif result.decision.verdict is Verdict.GONE:
            removed.add(endpoint)
        elif result.delivery.attempts_since_replay + 1 >= conf().webhooks.quick_attempts:
            failing.add(endpoint)
    with connection.cursor() as cursor:
        if succeeded:
            cursor.execute(
                "UPDATE webhooks_endpoint SET failing_since = NULL WHERE failing_since IS NOT NULL"
                " AND (tenant_id, address) IN (SELECT * FROM unnest(%s::text[], %s::text[]))",
                _columns(succeeded),
            )
    for tid, address in (failing | removed) - succeeded:
        _mark_failing(tid, address, now)
    for tid, address in removed:
        disable_endpoint(tid, address, "The endpoint answered 410 Gone.", now)


def _mark_failing(tid: str, address: str, now: datetime) -> None:
    endpoints = Endpoint.objects.filter(tenant_id=tid, address=address)
    if not endpoints.filter(failing_since=None).update(failing_since=now) and Tenant.objects.filter(pk=tid).exists():
        endpoint = Endpoint(tenant_id=tid, address=address, failing_since=now)
        Endpoint.objects.bulk_create([endpoint], ignore_conflicts=True)


def disable_endpoint(tid: str, address: str, reason: str, now: datetime) -> int:
    """Disable an endpoint and hold its pending deliveries; return how many are held."""
    Endpoint.objects.filter(tenant_id=tid, address=address, is_enabled=True).update(
        is_enabled=False, disabled_at=now, disabled_because=reason
    )
    return Delivery.objects.filter(tenant_id=tid, address=address, status=Delivery.Status.PENDING).update(
        status=Delivery.Status.HELD, reservation=None, ended_at=now
    )


def _columns(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Turn pairs into two lists, the arguments of `unnest`."""
    rows = sorted(pairs)
    return [[first for first, _ in rows], [second for _, second in rows]]
