"""`manage.py check` reports each problem of a deployment with an id and a hint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from codeq_site import checks
from core.conf import Conf, build

GOOD: dict[str, Any] = {
    "production": True,
    "secret_key": "k7" * 40,
    "allowed_hosts": ["codeq.example.com"],
    "redis_url": "rediss://valkey.example.com/0",
    "database_url": "postgresql://codeq@db.example.com/codeq",
    "broker_url": "rediss://broker.example.com/0",
}
CLUSTER = {"redis_cluster": True, "redis_url": "rediss://:p,w@a.example.com,b.example.com:6379/0"}


def conf_with(**changes: Any) -> Conf:
    return build({**GOOD, **changes})


def problem_ids(conf: Conf) -> list[str | None]:
    return [problem.id for problem in [*checks.general_problems(conf), *checks.deployment_problems(conf)]]


def test_correct_deployment_has_no_problem() -> None:
    assert problem_ids(conf_with()) == []
    assert problem_ids(conf_with(**CLUSTER)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"redis_url": "http://valkey.example.com"}, "codeq.E001"),
        ({"database_url": "sqlite:///codeq.db"}, "codeq.E002"),
        ({"webhooks": {"allow_hosts": ["receivers.example.com"]}}, "codeq.E003"),
        ({"webhooks": {"allow_hosts": ["203.0.113.9/24"]}}, "codeq.E003"),
        ({"artifacts": "ftp://example.com/"}, "codeq.E004"),
        ({"redis_cluster": True, "redis_url": "unix:///run/valkey.sock?db=0"}, "codeq.E005"),
        (CLUSTER | {"broker_url": "redis://b.example.com:6379/1"}, "codeq.E006"),
        (CLUSTER | {"broker_url": "rediss://user:secret@a.example.com"}, "codeq.E006"),
        ({"artifacts": "s3:///prefix"}, "codeq.E004"),
        ({"production": False}, "codeq.E010"),
        ({"secret_key": ""}, "codeq.E011"),
        ({"secret_key": "k7" * 24}, "codeq.E011"),
        ({"secret_key": "insecure-" + "k7" * 40}, "codeq.E011"),
        ({"allowed_hosts": ["codeq.example.com", "*"]}, "codeq.E012"),
        ({"allowed_hosts": []}, "codeq.E012"),
        ({"auth": {"provision_tenants": True}}, "codeq.E013"),
        ({"auth": {"producer_as_worker": True}}, "codeq.E014"),
        ({"auth": {"jwks_url": "http://keys.example.com/jwks.json"}}, "codeq.E015"),
        ({"queues": {"durability": "relaxed"}}, "codeq.E016"),
        ({"redis_url": ""}, "codeq.E017"),
        ({"database_url": ""}, "codeq.E017"),
        ({"broker_url": ""}, "codeq.E017"),
        ({"home": "/srv/codeq", "redis_url": "unix:///srv/codeq/run/valkey.sock?db=0"}, "codeq.E017"),
        ({"log_level": "DEBUG"}, "codeq.W018"),
        ({"webhooks": {"allow_hosts": ["127.0.0.0/8"]}}, "codeq.E019"),
        ({"webhooks": {"allow_hosts": ["::1/128"]}}, "codeq.E019"),
        ({"webhooks": {"allow_hosts": ["169.254.169.254/32"]}}, "codeq.E019"),
        ({"webhooks": {"allow_hosts": ["0.0.0.0/0"]}}, "codeq.E019"),
        ({"webhooks": {"allow_hosts": ["10.20.0.0/16"]}}, "codeq.W020"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_setting_is_reported(changes: Mapping[str, Any], expected: str) -> None:
    conf = conf_with(**changes)
    assert problem_ids(conf) == [expected]
    assert all(problem.hint for problem in [*checks.general_problems(conf), *checks.deployment_problems(conf)])


def test_public_network_may_be_allowed() -> None:
    assert problem_ids(conf_with(webhooks={"allow_hosts": ["8.8.8.0/24"]})) == []


def run_check(environment: Mapping[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, settings.BASE_DIR / "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        env={"PATH": "/usr/bin:/bin", "CODEQ_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_check_command_refuses_the_defaults(tmp_path: Path) -> None:
    answer = run_check({}, tmp_path)
    assert answer.returncode == 1
    for expected in ("codeq.E010", "codeq.E011", "codeq.E017"):
        assert expected in answer.stderr


def test_check_command_accepts_a_correct_deployment(tmp_path: Path) -> None:
    answer = run_check(
        {
            "CODEQ_PRODUCTION": "true",
            "SECRET_KEY": "aB3-dE6_gH9" * 7,
            "CODEQ_ALLOWED_HOSTS": GOOD["allowed_hosts"][0],
            "REDIS_URL": GOOD["redis_url"],
            "DATABASE_URL": GOOD["database_url"],
            "CELERY_BROKER_URL": GOOD["broker_url"],
        },
        tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
