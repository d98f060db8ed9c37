"""The site as a Django app: its commands and system checks."""

from __future__ import annotations

import logging

from django.apps import AppConfig

from core.conf import replace_former_names

log = logging.getLogger("codeq.settings")


class SiteConfig(AppConfig):
    name = "codeq_site"
    verbose_name = "codeQ"

    def ready(self) -> None:
        from django.conf import settings

        from codeq_site import checks  # noqa: F401  (registers the checks)

        _, warnings = replace_former_names(settings.CODEQ)
        for text in warnings:
            log.warning("%s", text)
