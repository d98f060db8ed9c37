"""The only reader of os.environ: environment variables to the plain values of `settings.CODEQ`.

`CODEQ_WEB_PORT` sets `web.port`; a `CODEQ_…` name that no setting has is an error, with the nearest one named.
What `manage.py up` started (`embedded.json` under CODEQ_HOME) fills in for REDIS_URL and DATABASE_URL.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from core.conf import Conf, Section, build
from core.errors import ConfigError

# Names that operators know from elsewhere, and the setting each one is.
KNOWN_AS = {
    "REDIS_URL": "redis_url",
    "DATABASE_URL": "database_url",
    "CELERY_BROKER_URL": "broker_url",
    "SPARK_MASTER": "spark_master",
    "SECRET_KEY": "secret_key",
    "SECRET_KEY_FALLBACKS": "secret_key_fallbacks",
    "CODEQ_PORT": "web.port",
    "CODEQ_SERVE": "web.serve",
    "CODEQ_PARTITIONS": "queues.partitions",
}
# Read by the tests and the Makefile, not settings of the service.
NOT_OURS = ("CODEQ_TEST_", "CODEQ_BENCH_")
EMBEDDED_FILE = "embedded.json"


def names() -> dict[str, str]:
    """Every environment variable that is read, with the dotted setting it sets."""
    found = dict(KNOWN_AS)
    for field in msgspec.structs.fields(Conf):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            for inner in msgspec.structs.fields(field.type):
                found[f"CODEQ_{field.name}_{inner.name}".upper()] = f"{field.name}.{inner.name}"
        else:
            found[f"CODEQ_{field.name}".upper()] = field.name
    return found


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The values of `settings.CODEQ`: what the environment gives, and what `manage.py up` runs."""
    values = given(environ)
    _add_embedded(values)
    return values


def given(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What the environment itself gives, without the embedded servers."""
    known = names()
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if name not in known:
            if name.startswith("CODEQ_") and not name.startswith(NOT_OURS):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]}?" if near else " docs/reference/settings.md lists them all."
                raise ConfigError(f"{name} is not a setting.{hint}")
            continue
        if text != "":
            _put(values, known[name], text)
    return values


def inherited(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: ours, with these settings instead of whatever name set them here."""
    known = names()
    replaced = {known.get(name) for name in changes} - {None}
    kept = {name: text for name, text in os.environ.items() if known.get(name) not in replaced}
    return {**kept, **changes}


def _put(values: dict[str, Any], path: str, text: str) -> None:
    section, _, field = path.rpartition(".")
    owner = {f.name: f.type for f in msgspec.structs.fields(Conf)}[section] if section else Conf
    types = {f.name: f.type for f in msgspec.structs.fields(owner)}
    is_list = "list[" in str(types[field])
    target = values.setdefault(section, {}) if section else values
    target[field] = [part.strip() for part in text.split(",") if part.strip()] if is_list else text


def _add_embedded(values: dict[str, Any]) -> None:
    """Servers that `manage.py up` runs are found by every other command of the same home, without a variable."""
    file = Path(values.get("home", Conf().home)).expanduser() / EMBEDDED_FILE
    try:
        if build(values).production or not file.is_file():
            return
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): run as the user who started codeQ there, or set CODEQ_HOME."
        ) from error
    for field, value in found.items():
        section, _, name = field.rpartition(".")
        target = values.setdefault(section, {}) if section else values
        target.setdefault(name, value)
