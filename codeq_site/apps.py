"""The site as a Django app: it brings the commands and the system checks."""

from __future__ import annotations

from django.apps import AppConfig


class SiteConfig(AppConfig):
    name = "codeq_site"
    verbose_name = "codeQ"

    def ready(self) -> None:
        from codeq_site import checks  # noqa: F401  (registers itself)
