"""The docs show every page that pictures are taken of, as large as a repository bears."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.browser.screenshots import IMAGES, MOST_BYTES, ROOT, VIEWS, pages

NAMES = sorted(pages(defaultdict(str)))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_shown_light_and_dark_on_a_desktop_and_on_a_phone(name: str) -> None:
    shown = (ROOT / "docs" / "howto" / "console.md").read_text()
    for view, _, _ in VIEWS:
        file = IMAGES / f"{name}-{view}.png"
        assert 0 < file.stat().st_size < MOST_BYTES
        assert f"../images/{file.name}" in shown


def test_there_is_no_picture_of_a_page_that_is_gone() -> None:
    taken = {f"{name}-{view}.png" for name in NAMES for view, _, _ in VIEWS}
    assert {file.name for file in IMAGES.glob("*.png")} == taken
