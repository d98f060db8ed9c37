"""The docs show a screenshot of every page, in all views and below the size limit."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.browser.screenshots import IMAGES, ROOT, SIZE_LIMIT, VIEWS, pages

NAMES = sorted(pages(defaultdict(str)))


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_show_a_page_in_all_views(name: str) -> None:
    text = (ROOT / "docs" / "howto" / "console.md").read_text()
    for view, _, _ in VIEWS:
        file = IMAGES / f"{name}-{view}.png"
        assert 0 < file.stat().st_size < SIZE_LIMIT
        assert f"../images/{file.name}" in text


def test_every_screenshot_belongs_to_a_page() -> None:
    expected = {f"{name}-{view}.png" for name in NAMES for view, _, _ in VIEWS}
    assert {file.name for file in IMAGES.glob("*.png")} == expected
