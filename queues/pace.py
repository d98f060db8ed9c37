"""How fast something may be done for a tenant, for apps that do it in the background and can wait."""

from __future__ import annotations

from core.errors import TooMany, Unavailable
from queues import services
from tenants.tenant import Tenant

# Where Redis cannot say, nothing more is done for so long: a limiter that fails does not open.
CLOSED_SECONDS = 1.0


def webhook(tenant: Tenant) -> float:
    """Count one callback against the tenant's rate: 0 = go ahead, otherwise how many seconds to wait."""
    if not tenant.rates.webhook:
        return 0.0
    try:
        services.admit(tenant, "webhook", tenant.rates.webhook).run_sync()
    except TooMany as error:
        return error.retry_after_seconds or CLOSED_SECONDS
    except Unavailable:
        return CLOSED_SECONDS
    return 0.0
