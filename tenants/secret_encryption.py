"""Encryption of stored secrets with a key derived from SECRET_KEY.

A copy of the database alone does not reveal the secrets.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.apps import apps
from django.conf import settings
from django.db.models import Field, Model

from core.errors import ConfigError


def encrypt(secret: bytes) -> str:
    return _fernet(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS)).encrypt(secret).decode("ascii")


def decrypt(encrypted: str) -> bytes:
    """Return the secret. Raises ConfigError if no configured key encrypted it."""
    try:
        return _fernet(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS)).decrypt(encrypted.encode("ascii"))
    except InvalidToken as error:
        raise ConfigError(
            "A stored secret was encrypted with another SECRET_KEY. Add that key to SECRET_KEY_FALLBACKS."
        ) from error


def encrypted_fields() -> list[tuple[type[Model], Field[Any, Any]]]:
    """Return the fields of all apps that hold encrypted secrets.

    The names of their columns end in `sealed`.
    """
    return [
        (model, field)
        for model in apps.get_models()
        for field in model._meta.local_concrete_fields
        if (field.column or "").endswith("sealed")
    ]


def reencrypt() -> Iterator[tuple[str, bool]]:
    """Encrypt every stored secret with the current SECRET_KEY.

    Yields the column of each secret, and whether a configured key could decrypt it.
    """
    fernet = _fernet(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS))
    for model, field in encrypted_fields():
        name, label = field.name, f"{model._meta.label}.{field.column}"
        for key, encrypted in model._default_manager.exclude(**{name: ""}).values_list("pk", name).iterator():
            try:
                renewed = fernet.rotate(encrypted.encode("ascii")).decode("ascii")
            except InvalidToken:
                yield label, False
                continue
            # The condition on the old value keeps a secret that was replaced in the meantime.
            model._default_manager.filter(pk=key, **{name: encrypted}).update(**{name: renewed})
            yield label, True


@cache
def _fernet(key: str, fallbacks: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([_derive_fernet(secret_key) for secret_key in (key, *fallbacks)])


def _derive_fernet(secret_key: str) -> Fernet:
    # The label makes this key different from those of other uses of SECRET_KEY (sessions, password reset links).
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"codeq: secrets at rest")
    return Fernet(base64.urlsafe_b64encode(derived.derive(secret_key.encode())))
