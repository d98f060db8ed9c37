"""What `manage.py up` does in the database before the first request: `python -m codeq_site.devserver.bootstrap`.

Migrates; outside production also makes a tenant, an admin and their tokens. Prints what `up` shows, as JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import django
import msgspec

TENANT = "demo"
ADMIN = "admin"
PASSWORD_FILE = "admin_password"  # noqa: S105  (a file's name)
TOKEN_SECONDS = 86_400


class BootstrapResult(msgspec.Struct):
    """What the newcomer is shown. Empty: in production, a password already changed, tokens of another issuer."""

    has_admin: bool = False
    password: str = ""
    producer: str = ""
    worker: str = ""


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
    from django.db import Error
    from redis import RedisError

    from core.errors import ConfigError

    try:
        django.setup()
        seeded = bootstrap()
    except (ConfigError, Error, RedisError) as error:
        sys.exit(" ".join(str(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(seeded))


def bootstrap() -> BootstrapResult:
    from django.core.management import call_command

    from core.conf import conf
    from core.redis.connections import client, settle_partitions

    call_command("migrate", interactive=False, verbosity=0)
    settle_partitions(client())
    if conf().production:
        return BootstrapResult()
    from tenants import services
    from tenants.domain import CallerRole

    services.provision(TENANT)
    seeded = BootstrapResult(has_admin=True, password=_admin_password(conf().home_path / PASSWORD_FILE))
    if not conf().auth.jwks_url:
        seeded.producer = services.issue_token(TENANT, CallerRole.PRODUCER, ttl_seconds=TOKEN_SECONDS)
        seeded.worker = services.issue_token(TENANT, CallerRole.WORKER, subject="worker-1", ttl_seconds=TOKEN_SECONDS)
    return seeded


def _admin_password(file: Path) -> str:
    """The admin's password as long as it is the one we made; empty once somebody has changed it."""
    from django.contrib.auth import get_user_model

    password = file.read_text(encoding="utf-8").strip()
    users = get_user_model().objects
    admin = users.filter(username=ADMIN).first()
    if admin is None:
        users.create_superuser(username=ADMIN, password=password)
        return password
    return password if admin.check_password(password) else ""


if __name__ == "__main__":
    main()
