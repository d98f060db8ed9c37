"""The Django app of callbacks and notifications."""

from __future__ import annotations

from django.apps import AppConfig


class WebhooksConfig(AppConfig):
    name = "webhooks"
    verbose_name = "Webhooks"

    def ready(self) -> None:
        from queues.audit import events
        from webhooks import callbacks

        events.on_ended(callbacks.create_deliveries)
