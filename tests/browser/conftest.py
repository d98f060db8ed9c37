"""One `manage.py up` and one chromium for all tests here; a tab of its own for each, watched for errors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import driving
from tests.browser.driving import DESKTOP, PASSWORD, SEEN, Site, Watched
from tests.codeq_site.installation import Installation

LogIn = Callable[..., Page]
expect.set_options(timeout=SEEN)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Not for the session: while Playwright runs, its event loop runs in this thread, and no other test's can."""
    if driving.chromium() is None:
        pytest.skip("there is no chromium on this machine (Debian: apt-get install chromium)")
    with driving.browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def site(chromium: Browser) -> Iterator[Site]:
    room = Path(tempfile.mkdtemp(prefix="codeq-b"))
    installation = Installation(room / "home")
    installation.start()
    yield Site(installation)
    installation.close()
    shutil.rmtree(room)


@pytest.fixture
def log_in(chromium: Browser, site: Site) -> Iterator[LogIn]:
    """`log_in()` as the superuser, `log_in("person")` as somebody else: a page, which must stay quiet."""
    opened: list[Watched] = []

    def enter(username: str = "admin", *, viewport: dict[str, int] = DESKTOP, **asked: Any) -> Page:
        context = chromium.new_context(viewport=viewport, **asked)  # type: ignore[arg-type]
        context.set_default_timeout(SEEN)
        watched = Watched(context, site.base)
        opened.append(watched)
        return watched.log_in(username, site.admin_password if username == "admin" else PASSWORD)

    yield enter
    for watched in opened:
        watched.page.context.close()
        watched.assert_quiet()
