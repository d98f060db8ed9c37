"""The files in deploy/, the Dockerfile and docker-compose.yml name what exists.

tests/deploy runs them with helm and nginx.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from celery.bin.beat import beat
from celery.bin.worker import worker
from django.conf import settings
from django.core.management import get_commands

from codeq_site import env
from codeq_site.celery import CELERY_QUEUES

ROOT = Path(settings.BASE_DIR)
CHART = ROOT / "deploy" / "helm" / "codeq"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
VALUES = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((CHART / "ci").glob("*.yaml"))}
# Variables of docker-compose.yml itself.
COMPOSE_VARIABLES = {"CODEQ_TAG"}


def list_files() -> list[Path]:
    files = [ROOT / "Dockerfile", ROOT / "docker-compose.yml", *(ROOT / "deploy").rglob("*")]
    return [path for path in files if path.is_file() and path.suffix not in (".py", ".pyc")]


@pytest.mark.parametrize("path", list_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_named_setting_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:CODEQ_[A-Z_]+|[A-Z]+_URL|SECRET_KEY|SPARK_MASTER)\b", text))
    assert named <= env.names().keys() | COMPOSE_VARIABLES


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge values as helm does: tables key by key, everything else as a whole."""
    merged = dict(values)
    for name, change in changes.items():
        is_table = isinstance(change, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], change) if is_table else change
    return merged


@pytest.mark.parametrize("name", VALUES)
def test_values_match_their_schema(name: str) -> None:
    jsonschema.validate(merge(DEFAULTS, VALUES[name]), SCHEMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"artifacts": ""},
        {"replicas": 2},
        {"web": {"replicas": 0}},
        {"env": {"codeq_queues_batch": "1"}},
        {"env": {"SECRET_KEY": "a secret does not belong into values"}},
        {"pipeline": {"enabled": True}},
        {"networkPolicy": {"enabled": True}},
    ],
    ids=str,
)
def test_wrong_value_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merge(merge(DEFAULTS, VALUES["minimal-values.yaml"]), changes), SCHEMA)


def test_chart_has_the_version_of_the_service() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == project["version"]


def test_images_run_as_a_numeric_user() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.M)
    assert {name: base for base, name in stages[-2:]} == {"pipeline": "base", "server": "base"}
    assert re.findall(r"^USER (.+)$", DOCKERFILE, flags=re.M) == ["10001:10001"]


def test_image_contains_only_what_the_wheel_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert packages < kept
    assert {name for name in kept if not (ROOT / name).exists()} == set()
    assert kept.isdisjoint({"tests", "docs", "bench", "examples"})


def test_compose_profiles_add_services() -> None:
    profiles = {name: service.get("profiles", []) for name, service in COMPOSE["services"].items()}
    without = {name for name, needed in profiles.items() if not needed}
    assert {name for name, needed in profiles.items() if needed} == {"pipeline", "proxy"}
    for name, service in COMPOSE["services"].items():
        assert service["restart"], name
        assert set(service.get("depends_on", {})) <= without | set(profiles[name])
        target = service.get("build", {}).get("target")
        assert target is None or f" AS {target}\n" in DOCKERFILE


def test_compose_gives_processes_valid_settings() -> None:
    for name in ("migrate", "web", "worker", "beat", "pipeline"):
        environment = COMPOSE["services"][name]["environment"]
        # `${NAME:-default}` and `${NAME:?message}` become a value.
        expanded = {key: re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", text) for key, text in environment.items()}
        assert env.read_variables(expanded)["production"] == "true"


def list_commands() -> Iterator[tuple[str, list[str]]]:
    """List the commands of units, containers and the chart, with their places."""
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(encoding="utf-8"), flags=re.M)
        program, *arguments = shlex.split(line)
        assert Path(program).parent == Path("/opt/codeq/bin")
        yield unit.name, [Path(program).name, *arguments]
    for name, service in COMPOSE["services"].items():
        if service["image"].startswith("codeq-"):
            yield f"service {name}", service["command"]
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"^ *command: \[(.+)\]$", text, flags=re.M):
            yield path.name, line.split(", ")
        for block in re.findall(r"^ *command:\n((?: +(?:- .*|\{\{.*)\n)+)", text, flags=re.M):
            yield path.name, [word for word in re.findall(r"^ +- (.+)$", block, flags=re.M) if "{{ . }}" not in word]


@pytest.mark.parametrize(("place", "command"), list(list_commands()), ids=lambda value: str(value)[:40])
def test_command_exists(place: str, command: list[str]) -> None:
    program, *arguments = command
    if program == "codeq-server":
        assert arguments[0] in get_commands()
    elif program == "python":
        assert arguments == ["-m", "codeq_site.web"]
    else:
        assert program == "celery"
        (kind,) = {"worker", "beat"} & set(arguments)
        known = {option for parameter in {"worker": worker, "beat": beat}[kind].params for option in parameter.opts}
        options = arguments[arguments.index(kind) + 1 :]
        assert {option.partition("=")[0] for option in options} <= known
        queues = [option.partition("=")[2] for option in options if option.startswith("--queues=")]
        assert set(queues) <= set(CELERY_QUEUES)


def test_guide_names_values_that_exist() -> None:
    guide = (ROOT / "docs" / "howto" / "kubernetes.md").read_text(encoding="utf-8")
    chosen = re.findall(r"--set ([\w.]+)=", guide)
    mentioned = re.findall(r"`((?:web|worker|pipeline|ca|networkPolicy|podMonitor)\.\w+)`", guide)
    assert len(chosen) >= 5
    assert len(mentioned) >= 5
    for path in {*chosen, *mentioned}:
        value = DEFAULTS
        for key in path.split("."):
            assert key in value, path
            value = value[key]
    (example,) = re.findall(r"^```yaml\n(taskWorkers:.*?)^```$", guide, flags=re.M | re.S)
    jsonschema.validate(yaml.safe_load(example)["taskWorkers"], SCHEMA["properties"]["taskWorkers"])
    assert set(re.findall(r"\bCODEQ_[A-Z_]+", guide)) <= env.names().keys()
