"""`manage.py token --tenant T --role worker`: print a token, and nothing else."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from core.errors import CodeqError, ConfigError
from tenants import services
from tenants.domain import CallerRole


class Command(BaseCommand):
    help = "Print a token of this installation's issuer (the JWT alone)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True)
        parser.add_argument("--role", required=True, choices=[str(role) for role in CallerRole])
        parser.add_argument("--sub", default=None, help="whose token it is; a worker's id (default: the role)")
        parser.add_argument("--commands", default="*", help="a worker's commands, comma-separated (default: all)")
        parser.add_argument("--group", default="", help="the worker's group")
        parser.add_argument("--ttl", type=int, default=3600, help="seconds it lives (default: 3600)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            token = services.issue_token(
                options["tenant"],
                options["role"],
                subject=options["sub"],
                commands=[each.strip() for each in options["commands"].split(",") if each.strip()],
                group=options["group"],
                ttl_seconds=options["ttl"],
            )
        except (CodeqError, ConfigError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(token)
