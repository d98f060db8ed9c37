"""The app of ranked queues."""

from __future__ import annotations

from django.apps import AppConfig


class RankedConfig(AppConfig):
    name = "ranked"
    verbose_name = "Ranked queues"
