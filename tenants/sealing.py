"""Secrets at rest, sealed with a key derived from SECRET_KEY: a copy of the database alone opens nothing."""

from __future__ import annotations

import base64
from functools import cache

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

from codeq_site.errors import ConfigError


def seal(secret: bytes) -> str:
    return _box(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS)).encrypt(secret).decode("ascii")


def unseal(sealed: str) -> bytes:
    """The secret, or a ConfigError when it was sealed under a SECRET_KEY that is not configured any more."""
    try:
        return _box(settings.SECRET_KEY, tuple(settings.SECRET_KEY_FALLBACKS)).decrypt(sealed.encode("ascii"))
    except InvalidToken as error:
        raise ConfigError(
            "A stored secret was sealed under another SECRET_KEY: add the former one to SECRET_KEY_FALLBACKS."
        ) from error


@cache
def _box(key: str, former: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([_fernet(each) for each in (key, *former)])


def _fernet(secret_key: str) -> Fernet:
    # The label keeps this key apart from every other use of SECRET_KEY (sessions, reset links).
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"codeq: secrets at rest")
    return Fernet(base64.urlsafe_b64encode(derived.derive(secret_key.encode())))
