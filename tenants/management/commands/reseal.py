"""`manage.py reseal`: seal all stored secrets under the SECRET_KEY of now, so that the former one can be dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants import secret_encryption


class Command(BaseCommand):
    help = (
        "Seal every stored secret under SECRET_KEY. Afterwards nothing that is stored needs SECRET_KEY_FALLBACKS; "
        "keep a former key there until the sessions it has signed are over."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        done: Counter[str] = Counter()
        closed: Counter[str] = Counter()
        for column, is_open in secret_encryption.reencrypt():
            (done if is_open else closed)[column] += 1
        for column, count in sorted(done.items()):
            self.stdout.write(f"{column}: {count} sealed anew")
        if closed:
            listed = ", ".join(f"{count} in {column}" for column, count in sorted(closed.items()))
            raise CommandError(
                f"Not opened by SECRET_KEY or any of SECRET_KEY_FALLBACKS: {listed}. "
                "Name the key that sealed them in SECRET_KEY_FALLBACKS, or replace these secrets."
            )
