"""Read the environment variables into the plain values of `settings.CODEQ`.

`CODEQ_WEB_PORT` sets `web.port`. An unknown `CODEQ_…` name is an error, which suggests the most similar name. Where
REDIS_URL, DATABASE_URL or CELERY_BROKER_URL is not set, the server that `manage.py up` started is used: `up` writes its
address to `embedded.json` under CODEQ_HOME.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from core.conf import FORMER_NAMES, Conf, Section, build, variable
from core.errors import ConfigError

# Settings with a common or short name: environment variable -> setting.
ALIASES = {
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
# Prefixes of variables for tests and benchmarks. The service does not read them.
IGNORED_PREFIXES = ("CODEQ_TEST_", "CODEQ_BENCH_")
EMBEDDED_FILE = "embedded.json"


def names() -> dict[str, str]:
    """Return the environment variables that are read, with the paths of their settings.

    Former names are left out.
    """
    paths = dict(ALIASES)
    for field in msgspec.structs.fields(Conf):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            for inner in msgspec.structs.fields(field.type):
                path = f"{field.name}.{inner.name}"
                paths[variable(path)] = path
        else:
            paths[variable(field.name)] = field.name
    return paths


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the values of `settings.CODEQ`, from the environment and from `manage.py up`."""
    values = read_variables(environ)
    _add_embedded(values)
    return values


def read_variables(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the values that the environment sets, without those of `manage.py up`.

    A former name stays in the values: `core.conf.build` replaces it.
    """
    known = names()
    former = {variable(path): path for path in FORMER_NAMES}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        path = known.get(name) or former.get(name)
        if path is None:
            if name.startswith("CODEQ_") and not name.startswith(IGNORED_PREFIXES):
                similar = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {similar[0]}?" if similar else " docs/reference/settings.md lists all settings."
                raise ConfigError(f"{name} is not a setting.{hint}")
        elif text != "":
            _put(values, path, text)
    return values


def for_child(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with changes, for a child process.

    Variables that set a changed setting under another name are left out.
    """
    paths = names() | {variable(former): path for former, path in FORMER_NAMES.items()}
    changed = {paths.get(name) for name in changes} - {None}
    kept = {name: text for name, text in os.environ.items() if paths.get(name) not in changed}
    return {**kept, **changes}


def _put(values: dict[str, Any], path: str, text: str) -> None:
    section, _, field = path.rpartition(".")
    owner = {f.name: f.type for f in msgspec.structs.fields(Conf)}[section] if section else Conf
    types = {f.name: f.type for f in msgspec.structs.fields(owner)}
    is_list = "list[" in str(types[FORMER_NAMES.get(path, path).rpartition(".")[2]])
    target = values.setdefault(section, {}) if section else values
    target[field] = [part.strip() for part in text.split(",") if part.strip()] if is_list else text


def _add_embedded(values: dict[str, Any]) -> None:
    """Add the values that `manage.py up` published, unless the environment sets them."""
    file = Path(values.get("home", Conf().home)).expanduser() / EMBEDDED_FILE
    try:
        if build(values).production or not file.is_file():
            return
        published = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): run as the user who started codeQ there, or set CODEQ_HOME."
        ) from error
    for path, value in published.items():
        section, _, field = path.rpartition(".")
        target = values.setdefault(section, {}) if section else values
        target.setdefault(field, value)
