"""`manage.py secret --tenant T`: print only the secret that signs a tenant's webhooks."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from core.errors import CodeqError, ConfigError
from tenants import services


class Command(BaseCommand):
    help = "Print the secret that signs a tenant's webhooks (whsec_…). The first call creates it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self.stdout.write(services.get_or_create_signing_secret(options["tenant"]))
        except (CodeqError, ConfigError) as error:
            raise CommandError(str(error)) from error
