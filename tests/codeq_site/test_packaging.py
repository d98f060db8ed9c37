"""The wheel contains every file that the service needs, and its command is `manage.py`."""

from __future__ import annotations

import importlib
import subprocess
import tomllib
from pathlib import Path

import pytest
from django.conf import settings

ROOT = Path(settings.BASE_DIR)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOOL = PROJECT["tool"]["setuptools"]
PACKAGES = [pattern.removesuffix("*") for pattern in TOOL["packages"]["find"]["include"]]


def list_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [Path(name) for name in listed if (ROOT / name).is_file()]


def test_every_file_of_the_packages_is_in_the_wheel() -> None:
    data = {
        path.relative_to(ROOT)
        for package, patterns in TOOL["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    files = list_files()
    assert len(files) > 300
    for file in files:
        if file.suffix == ".py":  # `templates` has no Python: setuptools finds it as a namespace package
            assert (ROOT / file).with_name("__init__.py").is_file(), f"{file.parent} is not a package"
        else:
            assert file in data, f"{file} is not in package-data"


def test_templates_and_static_files_are_in_packages() -> None:
    directories = settings.TEMPLATES[0]["DIRS"]
    assert directories
    for directory in directories:
        assert Path(directory).relative_to(ROOT).parts[0] in PACKAGES


@pytest.mark.parametrize(("name", "target"), PROJECT["project"]["scripts"].items())
def test_command_is_manage_py(name: str, target: str) -> None:
    module, _, function = target.partition(":")
    assert (name, module) == ("codeq-server", "manage")
    assert module in TOOL["py-modules"]
    assert callable(getattr(importlib.import_module(module), function))
