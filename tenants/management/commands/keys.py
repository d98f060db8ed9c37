"""`manage.py keys list|rotate|retire KID`: list and replace the installation's keys."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenants.auth import installation_keys
from tenants.models import InstallationKey


class Command(BaseCommand):
    help = (
        "List and replace the keys that sign this installation's own tokens. To replace a key: rotate, wait until the "
        "tokens that it has signed have expired, then retire it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="list the keys, newest first; the newest key signs")
        actions.add_parser(
            "rotate", help="create a key and print its kid; it signs from now on, older keys still verify"
        )
        retire = actions.add_parser(
            "retire", help="refuse the tokens of a key; takes effect on all machines within three minutes"
        )
        retire.add_argument("kid")

    def handle(self, *args: Any, action: str, kid: str = "", **options: Any) -> None:
        if action == "rotate":
            self.stdout.write(installation_keys.rotate())
            return
        rows = list(InstallationKey.objects.all())
        if action == "list":
            for row in rows:
                self.stdout.write(f"{row.kid}  {row.created_at:%Y-%m-%d %H:%M}  {_use(row, rows)}")
            return
        if kid not in {row.kid for row in rows}:
            raise CommandError(f"Key {kid} does not exist. List the keys with `manage.py keys list`.")
        if kid == rows[0].kid:
            raise CommandError("This key signs new tokens. Replace it first with `manage.py keys rotate`.")
        installation_keys.retire(kid)


def _use(row: InstallationKey, rows: list[InstallationKey]) -> str:
    return "signs" if row == rows[0] else "verifies"
