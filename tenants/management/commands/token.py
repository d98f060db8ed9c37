"""`manage.py token --tenant T --role worker`: print only a token."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from core.errors import CodeqError, ConfigError
from tenants import services
from tenants.domain import CallerRole


class Command(BaseCommand):
    help = "Issue a token of this installation and print the JWT."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True)
        parser.add_argument("--role", required=True, choices=[str(role) for role in CallerRole])
        parser.add_argument("--sub", default=None, help="the token's subject, for a worker its id (default: the role)")
        parser.add_argument(
            "--commands", default="*", help="commands that a worker may claim, comma-separated (default: all)"
        )
        parser.add_argument("--group", default="", help="the worker's group")
        parser.add_argument("--ttl", type=int, default=3600, help="lifetime in seconds (default: 3600)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            token = services.issue_token(
                options["tenant"],
                options["role"],
                subject=options["sub"],
                commands=[command.strip() for command in options["commands"].split(",") if command.strip()],
                group=options["group"],
                ttl_seconds=options["ttl"],
            )
        except (CodeqError, ConfigError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(token)
