"""Fixtures: one `manage.py up`, one chromium, and a new tab for each login."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import automation
from tests.browser.automation import DESKTOP, PASSWORD, VISIBLE_TIMEOUT_MS, Site, WatchedTab
from tests.codeq_site.installation import Installation

LogIn = Callable[..., Page]
expect.set_options(timeout=VISIBLE_TIMEOUT_MS)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Start chromium for this package only.

    While Playwright runs, its event loop occupies this thread, so that async tests of other packages would fail.
    """
    if automation.find_chromium() is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    with automation.launch_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def site(chromium: Browser) -> Iterator[Site]:
    directory = Path(tempfile.mkdtemp(prefix="codeq-b"))
    installation = Installation(directory / "home")
    installation.start()
    yield Site(installation)
    installation.close()
    shutil.rmtree(directory)


@pytest.fixture
def log_in(chromium: Browser, site: Site) -> Iterator[LogIn]:
    """A function that logs in and returns a page.

    `log_in()` logs in the superuser, `log_in("vera")` this user. A page with an error on its console, or with a request
    to another host, fails the test.
    """
    tabs: list[WatchedTab] = []

    def open_tab(username: str = "admin", *, viewport: dict[str, int] = DESKTOP, **options: Any) -> Page:
        context = chromium.new_context(viewport=viewport, **options)  # type: ignore[arg-type]
        context.set_default_timeout(VISIBLE_TIMEOUT_MS)
        tab = WatchedTab(context, site.base)
        tabs.append(tab)
        return tab.log_in(username, site.admin_password if username == "admin" else PASSWORD)

    yield open_tab
    for tab in tabs:
        tab.page.context.close()
        tab.assert_no_errors()
