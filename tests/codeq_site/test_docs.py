"""What the pages say of the tests is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.conf import settings

EXPLANATIONS = sorted((Path(settings.BASE_DIR) / "docs" / "explanation").glob("*.md"))


@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    tests = Path(settings.BASE_DIR) / "tests"
    files = {file.name: file.read_text(encoding="utf-8") for file in tests.rglob("test_*.py")}
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", text)
    missing = [name for name in named if not any(f"def {name}(" in source for source in files.values())]
    missing += [name for name in re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", text) if name not in files]
    assert missing == []
