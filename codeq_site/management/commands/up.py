"""`manage.py up`: replace this process with the supervisor of `codeq_site.devserver.up`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from codeq_site import env
from core.conf import build
from core.errors import ConfigError


class Command(BaseCommand):
    help = "Start the web processes, Celery, and each server whose URL is not set (REDIS_URL, DATABASE_URL)."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, help="port of the API and the console (CODEQ_PORT, 8080)")
        parser.add_argument("--home", help="directory of all state (CODEQ_HOME, var)")
        parser.add_argument("--workers", type=int, help="web processes (CODEQ_WEB_WORKERS, one per core)")

    def handle(self, *args: Any, port: int | None, home: str | None, workers: int | None, **options: Any) -> None:
        chosen = {"CODEQ_WEB_PORT": port, "CODEQ_HOME": home, "CODEQ_WEB_WORKERS": workers}
        environ = env.for_child({name: str(value) for name, value in chosen.items() if value is not None})
        try:
            conf = build(env.read_variables(environ))
        except ConfigError as error:
            self.stderr.write(str(error))
            sys.exit(1)
        environ |= {
            "CODEQ_HOME": str(conf.home_path),
            "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
            "PYTHONUNBUFFERED": "1",
        }
        # This process has read the settings before the servers run, so it does not know their addresses. The new one
        # reads them afterwards.
        os.chdir(settings.BASE_DIR)
        os.execve(sys.executable, [sys.executable, "-m", "codeq_site.devserver.up"], environ)
