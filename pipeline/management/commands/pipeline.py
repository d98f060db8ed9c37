"""The command `manage.py pipeline run|load|simulate|generate|files|export`."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from core.conf import conf
from core.errors import CodeqError, ConfigError
from pipeline import services
from pipeline.spark import cli
from tenants.domain import CallerRole
from tenants.models import Tenant
from tenants.services import issue_token

LOAD_TOKEN_SECONDS = 24 * 3600  # a longer load must be resumed with a new token


class Command(BaseCommand):
    help = "Run the data pipeline: build marts from history, load datasets as tasks, simulate changes."

    def add_arguments(self, parser: CommandParser) -> None:
        cli.add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        arguments = argparse.Namespace(**options)
        try:
            getattr(self, f"_{arguments.action}")(arguments, arguments.lake or services.lake_url())
        except services.AlreadyRunning as error:
            self.stdout.write(str(error))
        except (CodeqError, ConfigError, ValueError) as error:
            raise CommandError(str(error)) from error

    def _run(self, arguments: argparse.Namespace, lake: str) -> None:
        jobs = rows = 0
        for log in services.run(
            arguments.jobs,
            lake=lake,
            since=arguments.since,
            until=arguments.until,
            files=arguments.files,
            settings=cli.parse_conf(arguments),
            show=self.stdout.write,
        ):
            jobs, rows = jobs + 1, rows + log.rows_out
            for note in log.notes.splitlines():
                self.stdout.write(f"{log.job}: {note}")
        self.stdout.write(f"{jobs} jobs, {rows} rows written")

    def _load(self, arguments: argparse.Namespace, lake: str) -> None:
        if not arguments.tenant:
            raise CommandError("--tenant is required: name the tenant that the tasks belong to.")
        web = conf().web
        arguments.url = arguments.url or f"http://{web.host}:{web.port}"
        if arguments.token_file:
            token = arguments.token_file.read().strip()
        else:
            token = issue_token(
                arguments.tenant, CallerRole.PRODUCER, subject="pipeline", ttl_seconds=LOAD_TOKEN_SECONDS
            )
        cli.run_load(
            services.start_spark(cli.parse_conf(arguments)),
            lake,
            arguments,
            token,
            self.stdout.write,
            self.stderr.write,
        )

    def _simulate(self, arguments: argparse.Namespace, lake: str) -> None:
        arguments.tenant = arguments.tenant and _find_tid(arguments.tenant)
        cli.run_simulate(services.start_spark(cli.parse_conf(arguments)), lake, arguments, self.stdout.write)

    def _generate(self, arguments: argparse.Namespace, lake: str) -> None:
        # Rows in the audit need existing tenants. Files may use generated ones.
        tids = [] if arguments.to else list(Tenant.objects.order_by("created_at", "tid").values_list("tid", flat=True))
        if not tids and not arguments.to:
            raise CommandError("There are no tenants. Create one first, for example with `manage.py token --tenant`.")
        cli.run_generate(
            services.start_spark(cli.parse_conf(arguments)), arguments, self.stdout.write, tids, services.dsn()
        )

    def _files(self, arguments: argparse.Namespace, lake: str) -> None:
        arguments.tenant = arguments.tenant and _find_tid(arguments.tenant)
        cli.print_files(lake, arguments, self.stdout.write, lambda: services.start_spark(cli.parse_conf(arguments)))

    def _export(self, arguments: argparse.Namespace, lake: str) -> None:
        arguments.tenant = _find_tid(arguments.tenant)
        cli.run_export(services.start_spark(cli.parse_conf(arguments)), lake, arguments, self.stdout.write)


def _find_tid(slug: str) -> str:
    try:
        return Tenant.objects.only("tid").get(slug=slug).tid
    except Tenant.DoesNotExist as error:
        raise CommandError(f"There is no tenant named {slug}.") from error
