"""Prepare the database for `manage.py up`: `python -m codeq_site.devserver.bootstrap`.

Run the migrations. Outside production, also create a tenant, its tokens and an admin. Print them as JSON for `up`.
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
    """The logins that `up` prints.

    In production all values are empty. The password is also empty if it was changed, and the tokens if another issuer
    signs them.
    """

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
        created = bootstrap()
    except (ConfigError, Error, RedisError) as error:
        sys.exit(" ".join(str(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(created))


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
    created = BootstrapResult(has_admin=True, password=_admin_password(conf().home_path / PASSWORD_FILE))
    if not conf().auth.jwks_url:
        created.producer = services.issue_token(TENANT, CallerRole.PRODUCER, ttl_seconds=TOKEN_SECONDS)
        created.worker = services.issue_token(TENANT, CallerRole.WORKER, subject="worker-1", ttl_seconds=TOKEN_SECONDS)
    return created


def _admin_password(file: Path) -> str:
    """Create the admin if necessary. Return its generated password, or "" if it was changed."""
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
