"""The installed wheel has all templates, static files, scripts and migrations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

ROOT = Path(settings.BASE_DIR)
# Counts what an installation finds, and prints one line.
COUNT = """
import pathlib, django, manage
django.setup()
from django.apps import apps
from django.conf import settings
from django.contrib.staticfiles import finders
from django.template.loader import get_template
from queues.engine import script_loader
import ranked.engine

assert pathlib.Path(manage.__file__).parent == settings.BASE_DIR == pathlib.Path.cwd(), manage.__file__
own = [directory for directory in settings.TEMPLATES[0]["DIRS"]]
templates = sorted(path.relative_to(own[0]).as_posix() for path in own[0].rglob("*.html"))
for name in templates:
    get_template(name)
scripts = [path for directory in script_loader.DIRECTORIES for path in directory.rglob("*.lua")]
migrations = [
    path for app in apps.get_app_configs() if pathlib.Path(app.path).parent == settings.BASE_DIR
    for path in pathlib.Path(app.path, "migrations").glob("0*.py")
]
assert finders.find("console/console.css")
print(len(templates), len(scripts), len(migrations))
"""


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    # A build writes into its source directory, so it gets a copy of the files of the repository.
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = subprocess.run(
        ["tar", "-c", "--null", "--files-from=-"], cwd=ROOT, input=files, capture_output=True, check=True
    ).stdout
    source = directory / "source"
    source.mkdir()
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(directory), str(source)], check=True, timeout=200)
    (wheel,) = directory.glob("codeq_server-*.whl")
    installed = directory / "site-packages"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)
    return installed


def run(site_packages: Path, *command: str) -> str:
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ},
        "PYTHONPATH": str(site_packages),
        "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
        "CODEQ_HOME": str(site_packages.parent / "home"),
    }
    ran = subprocess.run(
        command, cwd=site_packages, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_wheel_is_complete(site_packages: Path) -> None:
    packages = [path for path in ROOT.iterdir() if (path / "__init__.py").is_file() and path.name != "tests"]
    expected = [
        len(list((ROOT / "templates").rglob("*.html"))),
        sum(len(list(package.rglob("*.lua"))) for package in packages),
        sum(len(list((package / "migrations").glob("0*.py"))) for package in packages),
    ]
    assert min(expected) > 10
    found = run(site_packages, sys.executable, "-c", COUNT).split()
    assert [int(number) for number in found] == expected


def test_wheel_contains_no_tests(site_packages: Path) -> None:
    present = {path.name for path in site_packages.iterdir()}
    assert present.isdisjoint({"tests", "bench", "docs", "examples", "deploy"})


def test_installed_command_runs(site_packages: Path) -> None:
    answer = run(site_packages, str(site_packages / "bin" / "codeq-server"), "check")
    assert answer.startswith("System check identified no issues")
