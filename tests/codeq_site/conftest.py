"""Fixtures: installations that `manage.py up` runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.codeq_site.installation import Installation


@pytest.fixture(scope="session")
def running() -> Iterator[Installation]:
    """An installation shared by all tests that do not stop it."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-u"))
    installation = Installation(directory / "home")
    try:
        installation.start()
        yield installation
    finally:
        installation.close()
        shutil.rmtree(directory)


@pytest.fixture
def make_installation() -> Iterator[Callable[[], Installation]]:
    """Make installations for one test. The fixture stops those that still run at the end."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-u"))
    installations: list[Installation] = []

    def make() -> Installation:
        installations.append(Installation(directory / f"home-{len(installations)}"))
        return installations[-1]

    yield make
    for installation in installations:
        installation.close()
    shutil.rmtree(directory)
