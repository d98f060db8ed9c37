"""The pages name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.conf import settings

ROOT = Path(settings.BASE_DIR)
EXPLANATIONS = sorted((ROOT / "docs" / "explanation").glob("*.md"))


@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    # By path: several files have the same name.
    sources = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/test_*.py")
    }
    text = page.read_text(encoding="utf-8")
    functions = re.findall(r"`(test_\w+)`", text)
    missing = [name for name in functions if not any(f"def {name}(" in source for source in sources.values())]
    files = re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)`", text)
    missing += [name for name in files if not any(f"/{path}".endswith(f"/{name}") for path in sources)]
    assert missing == []
