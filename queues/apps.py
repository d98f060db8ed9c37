"""The Django app. It registers the loader of policies and the readiness check of Redis."""

from __future__ import annotations

from django.apps import AppConfig


class QueuesConfig(AppConfig):
    name = "queues"
    verbose_name = "Queues"

    def ready(self) -> None:
        from core.http.health import readiness
        from queues import policies
        from queues.readiness import find_redis_problem
        from tenants.cache import tenant_cache

        tenant_cache.register_loader("policies", policies.load)
        readiness.register(find_redis_problem)
