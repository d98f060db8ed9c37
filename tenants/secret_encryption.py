"""Secrets at rest, sealed with a key derived from SECRET_KEY: a copy of the database alone opens nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.apps import apps
from django.conf import settings
from django.db.models import Model

from core.errors import ConfigError


def encrypt(secret: bytes) -> str:
    return _box(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS)).encrypt(secret).decode("ascii")


def decrypt(sealed: str) -> bytes:
    """The secret, or a ConfigError when it was sealed under a SECRET_KEY that is not configured any more."""
    try:
        return _box(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS)).decrypt(sealed.encode("ascii"))
    except InvalidToken as error:
        raise ConfigError(
            "A stored secret was sealed under another SECRET_KEY: add the former one to SECRET_KEY_FALLBACKS."
        ) from error


def columns() -> list[tuple[type[Model], str]]:
    """Where sealed secrets are kept: every column of that name, in whatever app."""
    return [
        (model, field.name)
        for model in apps.get_models()
        for field in model._meta.local_concrete_fields
        if field.name.endswith("sealed")
    ]


def reencrypt() -> Iterator[tuple[str, bool]]:
    """Seal every secret under the SECRET_KEY of now. Each gives its column, and whether it could be opened."""
    box = _box(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS))
    for model, name in columns():
        for key, sealed in model._default_manager.exclude(**{name: ""}).values_list("pk", name).iterator():
            try:
                anew = box.rotate(sealed.encode("ascii")).decode("ascii")
            except InvalidToken:
                yield f"{model._meta.label}.{name}", False
                continue
            # One that was replaced meanwhile is new anyway, and stays.
            model._default_manager.filter(pk=key, **{name: sealed}).update(**{name: anew})
            yield f"{model._meta.label}.{name}", True


@cache
def _box(key: str, former: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([_fernet(each) for each in (key, *former)])


def _fernet(secret_key: str) -> Fernet:
    # The label keeps this key apart from every other use of SECRET_KEY (sessions, reset links).
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"codeq: secrets at rest")
    return Fernet(base64.urlsafe_b64encode(derived.derive(secret_key.encode())))
