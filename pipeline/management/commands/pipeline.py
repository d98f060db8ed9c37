"""`manage.py pipeline run|load|simulate|generate|files|export`: history to tables, and tables to tasks."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from core.conf import conf
from core.errors import CodeqError, ConfigError
from pipeline import services
from pipeline.spark import cli
from tenants.models import Tenant
from tenants.services import issue_token
from tenants.tenant import Role

LOAD_TOKEN_SECONDS = 24 * 3600  # a load that takes longer is resumed with another token


class Command(BaseCommand):
    help = "The data pipeline: history to marts, datasets to tasks, what-if on real history."

    def add_arguments(self, parser: CommandParser) -> None:
        cli.add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = argparse.Namespace(**options)
        try:
            getattr(self, f"_{chosen.what}")(chosen, chosen.lake or services.lake_url())
        except services.AlreadyRunning as running:
            self.stdout.write(str(running))
        except (CodeqError, ConfigError, ValueError) as error:
            raise CommandError(str(error)) from error

    def _run(self, chosen: argparse.Namespace, lake: str) -> None:
        jobs = rows = 0
        for log in services.run(
            chosen.jobs,
            lake=lake,
            since=chosen.since,
            until=chosen.until,
            files=chosen.files,
            settings=cli.conf(chosen),
            show=self.stdout.write,
        ):
            jobs, rows = jobs + 1, rows + log.rows_out
            for note in log.notes.splitlines():
                self.stdout.write(f"{log.job}: {note}")
        self.stdout.write(f"{jobs} jobs, {rows} rows written")

    def _load(self, chosen: argparse.Namespace, lake: str) -> None:
        if not chosen.tenant:
            raise CommandError("--tenant: whose tasks are they?")
        web = conf().web
        chosen.url = chosen.url or f"http://{web.host}:{web.port}"
        if chosen.token_file:
            token = chosen.token_file.read().strip()
        else:
            token = issue_token(chosen.tenant, Role.PRODUCER, subject="pipeline", ttl_seconds=LOAD_TOKEN_SECONDS)
        cli.run_load(services.session(cli.conf(chosen)), lake, chosen, token, self.stdout.write, self.stderr.write)

    def _simulate(self, chosen: argparse.Namespace, lake: str) -> None:
        chosen.tenant = chosen.tenant and _tid(chosen.tenant)
        cli.run_simulate(services.session(cli.conf(chosen)), lake, chosen, self.stdout.write)

    def _generate(self, chosen: argparse.Namespace, lake: str) -> None:
        # Into the audit goes history of tenants that are there; elsewhere they are invented too.
        known = [] if chosen.to else list(Tenant.objects.order_by("created_at", "tid").values_list("tid", flat=True))
        if not known and not chosen.to:
            raise CommandError("There is no tenant whose history could be invented: see `manage.py token --tenant`.")
        cli.run_generate(services.session(cli.conf(chosen)), chosen, self.stdout.write, known, services.dsn())

    def _files(self, chosen: argparse.Namespace, lake: str) -> None:
        chosen.tenant = chosen.tenant and _tid(chosen.tenant)
        cli.print_files(lake, chosen, self.stdout.write, lambda: services.session(cli.conf(chosen)))

    def _export(self, chosen: argparse.Namespace, lake: str) -> None:
        chosen.tenant = _tid(chosen.tenant)
        cli.run_export(services.session(cli.conf(chosen)), lake, chosen, self.stdout.write)


def _tid(slug: str) -> str:
    try:
        return Tenant.objects.only("tid").get(slug=slug).tid
    except Tenant.DoesNotExist as error:
        raise CommandError(f"There is no tenant {slug}.") from error
