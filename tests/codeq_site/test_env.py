"""Environment -> settings: the names, the kinds of values, and what `up` has published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from django.conf import settings

from codeq_site import env
from core.conf import Conf, build
from core.errors import ConfigError
from tests.conftest import free_port


def test_a_command_without_its_servers_says_what_to_do(tmp_path: Path) -> None:
    said = subprocess.run(
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
    assert (said.returncode, said.stdout) == (1, "")
    assert "Start codeQ first (`make run`)" in said.stderr
    assert "Traceback" not in said.stderr


def conf_of(tmp_path: Path, **environ: str) -> Conf:
    return build(env.read({"CODEQ_HOME": str(tmp_path), **environ}))


def publish(tmp_path: Path, **values: object) -> None:
    (tmp_path / "embedded.json").write_text(json.dumps(values))


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CODEQ_WEB_PROT is not a setting\. Did you mean CODEQ_WEB_PORT\?"):
        conf_of(tmp_path, CODEQ_WEB_PROT="1")


def test_an_unknown_name_that_is_near_to_nothing_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lists them all"):
        conf_of(tmp_path, CODEQ_ZZZZZZZZZZZZZZ="1")


def test_names_of_the_tests_and_of_others_are_left_alone(tmp_path: Path) -> None:
    conf_of(tmp_path, CODEQ_TEST_ANYTHING="1", CODEQ_BENCH_ANYTHING="1", EDITOR="ed")


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
def test_a_variable_sets_its_setting(tmp_path: Path, name: str, text: str, setting: str, value: object) -> None:
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
def test_a_bad_value_names_its_setting(tmp_path: Path, name: str, text: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        conf_of(tmp_path, **{name: text})


def test_what_up_runs_is_found_without_a_variable(tmp_path: Path) -> None:
    publish(tmp_path, redis_url="unix:///run/valkey.sock", **{"auth.provision_tenants": True})
    conf = conf_of(tmp_path)
    assert conf.redis_url == "unix:///run/valkey.sock"
    assert conf.auth.provision_tenants is True


def test_the_environment_wins_over_what_up_runs(tmp_path: Path) -> None:
    publish(tmp_path, redis_url="unix:///run/valkey.sock", **{"auth.provision_tenants": True})
    conf = conf_of(tmp_path, REDIS_URL="redis://elsewhere/0", CODEQ_AUTH_PROVISION_TENANTS="false")
    assert conf.redis_url == "redis://elsewhere/0"
    assert conf.auth.provision_tenants is False


def test_production_takes_nothing_that_up_has_published(tmp_path: Path) -> None:
    publish(tmp_path, redis_url="unix:///run/valkey.sock", secret_key="from-the-file")
    conf = conf_of(tmp_path, CODEQ_PRODUCTION="true")
    assert (conf.redis_url, conf.secret_key) == ("", "")
    assert conf_of(tmp_path, CODEQ_PRODUCTION="false").secret_key == "from-the-file"


def test_a_damaged_file_of_up_is_said(tmp_path: Path) -> None:
    (tmp_path / "embedded.json").write_text("{")
    with pytest.raises(ConfigError, match=r"embedded\.json cannot be read"):
        conf_of(tmp_path)


def test_a_child_inherits_one_name_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEQ_PORT", "8081")
    child = env.inherited({"CODEQ_WEB_PORT": "9000"})
    assert build(env.given(child)).web.port == 9000
    assert "CODEQ_PORT" not in child
