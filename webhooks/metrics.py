"""What is counted about webhooks. Labels name commands, never tenants or addresses: whoever may scrape is neither."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import InterfaceError, OperationalError, close_old_connections, connection

from core import metrics
from core.metrics import Counter, GaugeMetricFamily

# Counting further would cost a scrape its time, and says no more: far too many wait.
COUNTED = 100_000

_sent = Counter(
    "codeq_webhook_deliveries_total",
    "Callbacks and notifications sent, by what came of them.",
    ["kind", "command", "outcome"],
)


def sent(kind: str, command: str, *, is_delivered: bool) -> None:
    """Count one POST: kind `task_result` or `queue_ready`."""
    _sent.labels(kind, metrics.label(command), "success" if is_delivered else "failure").inc()


@metrics.at_scrape
def waiting(until: float) -> Iterator[GaugeMetricFamily]:
    """Every process says the same: take the `max`, not the sum. Nothing is said while PostgreSQL cannot."""
    try:
        close_old_connections()
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT (SELECT count(*) FROM webhooks_subscription WHERE expires_at > now()),"
                " (SELECT count(*) FROM (SELECT 1 FROM webhooks_delivery WHERE status = 'pending' LIMIT %s) AS first),"
                " (SELECT count(*) FROM webhooks_endpoint WHERE NOT is_enabled)",
                [COUNTED],
            )
            subscriptions, pending, disabled = cursor.fetchone()
    except (OperationalError, InterfaceError):
        return
    yield GaugeMetricFamily("codeq_subscriptions_active", "Workers' subscriptions.", value=subscriptions)
    yield GaugeMetricFamily("codeq_webhook_pending", "Callbacks not delivered, up to 100,000.", value=pending)
    yield GaugeMetricFamily("codeq_webhook_endpoints_disabled", "Endpoints that are not called.", value=disabled)
