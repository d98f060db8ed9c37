"""Metrics of webhooks.

Labels name commands, never tenants or addresses, because scrapers must not see those.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.db import InterfaceError, OperationalError, close_old_connections, connection

from core import metrics
from core.metrics import Counter, GaugeMetricFamily

# An exact count of a larger backlog would slow the scrape down and change no decision.
PENDING_COUNT_LIMIT = 100_000

_posts = Counter(
    "codeq_webhook_deliveries_total",
    "Callbacks and notifications sent, by outcome.",
    ["kind", "command", "outcome"],
)


def count_post(kind: str, command: str, *, is_delivered: bool) -> None:
    """Count one POST: kind `task_result` or `queue_ready`."""
    _posts.labels(kind, metrics.label(command), "success" if is_delivered else "failure").inc()


@metrics.at_scrape
def collect_gauges(until: float) -> Iterator[GaugeMetricFamily]:
    """Read the gauges from PostgreSQL; yield none while it is unavailable.

    Every process exports the same values: aggregate them with `max`, not `sum`.
    """
    try:
        close_old_connections()
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT (SELECT count(*) FROM webhooks_subscription WHERE expires_at > now()),"
                " (SELECT count(*) FROM (SELECT 1 FROM webhooks_delivery WHERE status = 'pending' LIMIT %s) AS first),"
                " (SELECT count(*) FROM webhooks_endpoint WHERE NOT is_enabled)",
                [PENDING_COUNT_LIMIT],
            )
            subscriptions, pending, disabled = cursor.fetchone()
    except (OperationalError, InterfaceError):
        return
    yield GaugeMetricFamily("codeq_subscriptions_active", "Live subscriptions of workers.", value=subscriptions)
    yield GaugeMetricFamily("codeq_webhook_pending", "Pending callbacks, counted up to 100,000.", value=pending)
    yield GaugeMetricFamily("codeq_webhook_endpoints_disabled", "Disabled endpoints.", value=disabled)
