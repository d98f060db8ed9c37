"""Reading the settings from the environment and from the file that `up` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from codeq_site import checks, env
from core import errors
from core.conf import FORMER_NAMES, Conf, build, variable
from core.errors import ConfigError
from tenants.auth import claims, validators
from tests.conftest import free_port


def test_command_without_its_servers_prints_what_to_do(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "manage.py", "token", "--tenant", "demo", "--role", "producer"],
        env={
            "PATH": os.environ["PATH"],
            "CODEQ_HOME": str(tmp_path),
            "DATABASE_URL": f"postgresql://a@127.0.0.1:{free_port()}/a",
        },
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (1, "")
    assert "Start codeQ first (`make run`)" in completed.stderr
    assert "Traceback" not in completed.stderr


def conf_of(tmp_path: Path, **environ: str) -> Conf:
    return build(env.read({"CODEQ_HOME": str(tmp_path), **environ}))


def publish(tmp_path: Path, **values: object) -> None:
    (tmp_path / "embedded.json").write_text(json.dumps(values))


def test_unknown_name_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CODEQ_WEB_PROT is not a setting\. Did you mean CODEQ_WEB_PORT\?"):
        conf_of(tmp_path, CODEQ_WEB_PROT="1")


def test_unknown_name_without_a_similar_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lists all settings"):
        conf_of(tmp_path, CODEQ_ZZZZZZZZZZZZZZ="1")


def test_names_of_tests_and_of_other_programs_are_ignored(tmp_path: Path) -> None:
    ignored = {"CODEQ_TEST_ANYTHING": "1", "CODEQ_BENCH_ANYTHING": "1", "EDITOR": "ed"}
    assert conf_of(tmp_path, **ignored) == conf_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "setting", "value"),
    [
        ("CODEQ_PORT", "8081", "web.port", 8081),
        ("CODEQ_WEB_PORT", "8081", "web.port", 8081),
        ("CODEQ_PARTITIONS", "32", "queues.partitions", 32),
        ("CODEQ_SERVE", "api", "web.serve", "api"),
        ("REDIS_URL", "redis://h/0", "redis_url", "redis://h/0"),
        ("CODEQ_PRODUCTION", "true", "production", True),
        ("CODEQ_PRODUCTION", "0", "production", False),
        ("CODEQ_ALLOWED_HOSTS", "a.example, b.example", "allowed_hosts", ["a.example", "b.example"]),
        ("SECRET_KEY_FALLBACKS", "former,older", "secret_key_fallbacks", ["former", "older"]),
        ("CODEQ_QUEUES_BACKOFF_BASE_SECONDS", "1.5", "queues.backoff_base_seconds", 1.5),
        ("CODEQ_WEB_PORT", "", "web.port", 8080),
    ],
)
def test_variable_sets_its_setting(tmp_path: Path, name: str, text: str, setting: str, value: object) -> None:
    assert attrgetter(setting)(conf_of(tmp_path, **{name: text})) == value


@pytest.mark.parametrize(
    ("name", "text", "setting"),
    [
        ("CODEQ_WEB_PORT", "eighty", r"\$\.web\.port"),
        ("CODEQ_WEB_PORT", "0", r"\$\.web\.port"),
        ("CODEQ_QUEUES_BACKOFF", "random", r"\$\.queues\.backoff"),
        ("CODEQ_QUEUES_BATCH", "1001", r"\$\.queues\.batch"),
        ("CODEQ_PRODUCTION", "perhaps", r"\$\.production"),
    ],
)
def test_error_of_a_wrong_value_names_the_setting(tmp_path: Path, name: str, text: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        conf_of(tmp_path, **{name: text})


def test_servers_of_up_are_found_without_a_variable(tmp_path: Path) -> None:
    publish(tmp_path, redis_url="unix:///run/valkey.sock", **{"auth.provision_tenants": True})
    conf = conf_of(tmp_path)
    assert conf.redis_url == "unix:///run/valkey.sock"
    assert conf.auth.provision_tenants is True


def test_environment_overrides_the_servers_of_up(tmp_path: Path) -> None:
    publish(tmp_path, redis_url="unix:///run/valkey.sock", **{"auth.provision_tenants": True})
    conf = conf_of(tmp_path, REDIS_URL="redis://elsewhere/0", CODEQ_AUTH_PROVISION_TENANTS="false")
    assert conf.redis_url == "redis://elsewhere/0"
    assert conf.auth.provision_tenants is False


def test_production_ignores_the_servers_of_up(tmp_path: Path) -> None:
    publish(tmp_path, redis_url="unix:///run/valkey.sock", secret_key="from-the-file")
    conf = conf_of(tmp_path, CODEQ_PRODUCTION="true")
    assert (conf.redis_url, conf.secret_key) == ("", "")
    assert conf_of(tmp_path, CODEQ_PRODUCTION="false").secret_key == "from-the-file"


def test_damaged_file_of_up_is_reported(tmp_path: Path) -> None:
    (tmp_path / "embedded.json").write_text("{")
    with pytest.raises(ConfigError, match=r"embedded\.json cannot be read"):
        conf_of(tmp_path)


def test_child_process_gets_one_name_per_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEQ_PORT", "8081")
    child = env.for_child({"CODEQ_WEB_PORT": "9000"})
    assert build(env.read_variables(child)).web.port == 9000
    assert "CODEQ_PORT" not in child


FORMER_VALUES = [
    ("CODEQ_QUEUES_HORIZON_SECONDS", "60", "queues.max_schedule_ahead_seconds", 60),
    ("CODEQ_QUEUES_INSPECT_LIMIT", "7", "queues.repair_limit", 7),
    ("CODEQ_WEBHOOKS_BURST", "3", "webhooks.max_unrecorded", 3),
    ("CODEQ_WEBHOOKS_TAIL_SECONDS", "5, 10", "webhooks.retry_tail_delays_seconds", [5.0, 10.0]),
    ("CODEQ_WEBHOOKS_TRIES", "2", "webhooks.quick_attempts", 2),
]


def test_every_former_name_is_tested() -> None:
    assert {name for name, *_ in FORMER_VALUES} == {variable(former) for former in FORMER_NAMES}


@pytest.mark.parametrize(("name", "text", "setting", "value"), FORMER_VALUES)
def test_former_name_sets_the_setting_with_a_warning(
    tmp_path: Path, name: str, text: str, setting: str, value: object
) -> None:
    values = env.read({"CODEQ_HOME": str(tmp_path), name: text})
    assert attrgetter(setting)(build(values)) == value
    (warning,) = checks.former_name_warnings(values)
    assert warning.id == "codeq.W021"
    assert warning.msg == f"{name} is now {variable(setting)}. The former name will not work in the next release."
    assert name not in env.names()


@pytest.mark.parametrize(("name", "text", "setting", "value"), FORMER_VALUES)
def test_both_names_of_a_setting_are_refused(tmp_path: Path, name: str, text: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} and {variable(setting)} are the same setting: unset {name}"):
        conf_of(tmp_path, **{name: text, variable(setting): text})


def test_former_name_in_the_django_setting_works() -> None:
    values = {"webhooks": {"tries": 2, "slots": 9}}
    assert (build(values).webhooks.quick_attempts, build(values).webhooks.slots) == (2, 9)
    assert values == {"webhooks": {"tries": 2, "slots": 9}}, "the caller's values do not change"
    with pytest.raises(ConfigError, match="unset CODEQ_WEBHOOKS_TRIES"):
        build({"webhooks": {"tries": 2, "quick_attempts": 2}})


def test_empty_former_name_sets_nothing(tmp_path: Path) -> None:
    assert conf_of(tmp_path, CODEQ_WEBHOOKS_TRIES="", CODEQ_WEBHOOKS_QUICK_ATTEMPTS="2").webhooks.quick_attempts == 2


def test_child_process_does_not_get_a_former_name_beside_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEQ_WEBHOOKS_TRIES", "2")
    assert env.for_child({})["CODEQ_WEBHOOKS_TRIES"] == "2"
    child = env.for_child({"CODEQ_WEBHOOKS_QUICK_ATTEMPTS": "3"})
    assert build(env.read_variables(child)).webhooks.quick_attempts == 3


def test_former_paths_of_validators_work_with_a_warning(tmp_path: Path) -> None:
    paths = "tenants.tokens.JwksValidator, own.Validator, tenants.tokens.TenantKeyValidator"
    values = env.read({"CODEQ_HOME": str(tmp_path), "CODEQ_AUTH_VALIDATORS": paths})
    assert build(values).auth.validators == [
        "tenants.auth.validators.JwksValidator",
        "own.Validator",
        "tenants.auth.validators.TenantKeyValidator",
    ]
    assert [warning.msg for warning in checks.former_name_warnings(values)] == [
        f"CODEQ_AUTH_VALIDATORS: tenants.tokens.{name} is now tenants.auth.validators.{name}. "
        "The former path will not work in the next release."
        for name in ("JwksValidator", "TenantKeyValidator")
    ]


OWN_VALIDATOR = """
from codeq_site.errors import Unauthenticated
from tenants.claims import Verified
from tenants.tokens import JwksValidator, Validator
"""


def test_validator_with_former_imports_works_with_a_warning() -> None:
    names: dict[str, Any] = {}
    with pytest.warns(FutureWarning, match="has moved: import") as caught:
        exec(OWN_VALIDATOR, names)
    assert len(caught) == 4
    assert names["Unauthenticated"] is errors.Unauthenticated
    assert names["Verified"] is claims.Verified
    assert (names["JwksValidator"], names["Validator"]) == (validators.JwksValidator, validators.Validator)


def test_process_logs_former_names_at_its_start(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "manage.py", "check"],
        env={
            "PATH": os.environ["PATH"],
            "CODEQ_HOME": str(tmp_path),
            "CODEQ_WEBHOOKS_TRIES": "2",
            "CODEQ_AUTH_VALIDATORS": "tenants.tokens.JwksValidator",
        },
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    logged = [line for line in completed.stderr.splitlines() if "WARNING" in line and "codeq.settings" in line]
    assert len(logged) == 2
    assert "CODEQ_WEBHOOKS_TRIES is now CODEQ_WEBHOOKS_QUICK_ATTEMPTS." in logged[0]
    assert "tenants.tokens.JwksValidator is now tenants.auth.validators.JwksValidator." in logged[1]
    assert completed.stderr.count("(codeq.W021)") == 2
