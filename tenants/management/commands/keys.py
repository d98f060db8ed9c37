"""`manage.py keys list|rotate|retire KID`: the keys that sign and verify this installation's own tokens."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenants.auth import installation_keys
from tenants.models import InstallationKey


class Command(BaseCommand):
    help = (
        "The keys of this installation's own tokens. To replace one: rotate, wait until the tokens that it has signed "
        "are over, retire it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="print every key that verifies, the one that signs first")
        actions.add_parser("rotate", help="sign with a new key and print its kid; former keys go on verifying")
        retire = actions.add_parser("retire", help="refuse what this key has signed, everywhere within three minutes")
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
            raise CommandError(f"There is no key {kid}: `manage.py keys list` shows them.")
        if kid == rows[0].kid:
            raise CommandError("This is the key that signs: `manage.py keys rotate` first.")
        installation_keys.retire(kid)


def _use(row: InstallationKey, rows: list[InstallationKey]) -> str:
    return "signs" if row == rows[0] else "verifies"
