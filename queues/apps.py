"""The app of queues."""

from __future__ import annotations

from django.apps import AppConfig


class QueuesConfig(AppConfig):
    name = "queues"
    verbose_name = "Queues"

    def ready(self) -> None:
        from queues import policies
        from tenants.directory import directory

        directory.keep("policies", policies.load)
