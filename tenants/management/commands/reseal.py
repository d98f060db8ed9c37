"""`manage.py reseal`: encrypt all stored secrets with the current SECRET_KEY."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants import secret_encryption


class Command(BaseCommand):
    help = (
        "Encrypt every stored secret with the current SECRET_KEY. Afterwards no stored secret needs "
        "SECRET_KEY_FALLBACKS. Keep an old key there until the sessions that it has signed have expired."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        encrypted: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for column, is_decrypted in secret_encryption.reencrypt():
            (encrypted if is_decrypted else failed)[column] += 1
        for column, count in sorted(encrypted.items()):
            self.stdout.write(f"{column}: {count} encrypted again")
        if failed:
            columns = ", ".join(f"{count} in {column}" for column, count in sorted(failed.items()))
            raise CommandError(
                f"Neither SECRET_KEY nor SECRET_KEY_FALLBACKS can decrypt these secrets: {columns}. "
                "Add the key that encrypted them to SECRET_KEY_FALLBACKS, or replace the secrets."
            )
