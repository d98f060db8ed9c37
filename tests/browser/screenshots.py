"""Take the screenshots of the docs: `python -m tests.browser.screenshots [NAME ...]`.

It starts an installation and fills it with data. It takes screenshots of every page, or of the named pages, in the
light and the dark theme, on a desktop and on a phone.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.browser import automation
from tests.browser.automation import Site, WatchedTab
from tests.codeq_site.installation import Installation, clean_environment

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ROOT / "docs" / "images"
SIZE_LIMIT = 200_000
# Enough for the colours of a page and its antialiased text. Saves two thirds of the bytes.
COLOURS = 128
VIEWS = [
    (f"{theme}{suffix}", theme, size)
    for theme in ("light", "dark")
    for suffix, size in (("", automation.DESKTOP), ("-phone", automation.PHONE))
]


def pages(ids: dict[str, str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the path and the query of each page, by name.

    The running bulk job comes first, before it ends.
    """
    acme = {"tenant": ids["acme"]}
    return {
        "bulk-job": ("console/bulk/job/", {"id": ids["job"]}),
        "bulk-job-completed": ("console/bulk/job/", {"id": ids["completed"]}),
        "bulk-job-failed": ("console/bulk/job/", {"id": ids["failed"]}),
        "bulk-jobs": ("console/bulk/", {}),
        "bulk-new": ("console/bulk/new/", acme),
        "overview": ("", {}),
        "queue": ("console/queue/", {**acme, "command": "invoice.render"}),
        "tasks": ("console/tasks/", {"q": "worker-7"}),
        "task": ("console/task/", {**acme, "id": ids["dead"]}),
        "task-done": ("console/task/", {**acme, "id": ids["done"]}),
        "task-waiting": ("console/task/", {**acme, "id": ids["waiting"]}),
        "dead-letters": ("console/dead/", {}),
        "dead-letters-list": ("console/dead/list/", acme),
        "charts": ("console/insights/", {**acme, "command": "sync-crm", "days": "30"}),
        "tenants": ("tenants/tenant/", {}),
        "tenant": (f"tenants/tenant/{ids['acme']}/change/", {}),
        "tenant-history": (f"tenants/tenant/{ids['acme']}/history/", {}),
        "memberships": ("tenants/tenantmembership/", {}),
        "issuers": ("tenants/tenantissuer/", {}),
        "signing-secrets": ("tenants/signingsecret/", {}),
        "operator-actions": ("admin/logentry/", {}),
        "audited-results": ("queues/auditedresult/", {}),
        "audited-result": (f"queues/auditedresult/{ids['done']}/change/", {}),
        "attempts": ("queues/attempt/", {}),
        "policies": ("queues/queuepolicy/", {}),
        "deliveries": ("webhooks/delivery/", {}),
        "delivery": (f"webhooks/delivery/{ids['delivery']}/change/", {}),
        "endpoints": ("webhooks/endpoint/", {}),
        "subscriptions": ("webhooks/subscription/", {}),
        "circuits": ("webhooks/circuit/", {}),
        "periodic-tasks": ("queues/periodictaskrun/", {}),
        "quarantine": ("queues/quarantine/", {}),
        "users": ("auth/user/", {}),
    }


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="codeq-s"))
    installation = Installation(directory / "home")
    try:
        installation.start()
        environment = clean_environment({"CODEQ_HOME": str(installation.home)})
        command = [sys.executable, "-m", "tests.browser.demo_data"]
        completed = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
        IMAGES.mkdir(parents=True, exist_ok=True)
        with automation.launch_browser() as browser:
            take_screenshots(browser, Site(installation), pages(json.loads(completed.stdout)), set(sys.argv[1:]))
    finally:
        installation.close()
        shutil.rmtree(directory, ignore_errors=True)


def take_screenshots(
    browser: Browser, site: Site, pages: dict[str, tuple[str, dict[str, str]]], only: set[str]
) -> None:
    tabs = {view: open_tab(browser, site, theme, size) for view, theme, size in VIEWS}
    for name, (path, query) in pages.items():
        for view, tab in tabs.items():
            if not only or name in only:
                tab.page.goto(f"{site.base}/admin/{path}?{urlencode(query)}")
                tab.page.wait_for_load_state("networkidle")
                save(tab.page, IMAGES / f"{name}-{view}.png")
    for tab in tabs.values():
        tab.assert_no_errors()
    if not only:
        for file in set(IMAGES.glob("*.png")) - {IMAGES / f"{name}-{view}.png" for name in pages for view in tabs}:
            print(f"{file.name} is not the screenshot of any page; delete it")


def open_tab(browser: Browser, site: Site, theme: Any, size: Any) -> WatchedTab:
    tab = WatchedTab(browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1), site.base)
    tab.log_in("admin", site.admin_password)
    return tab


def save(page: Page, file: Path) -> None:
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    assert file.stat().st_size < SIZE_LIMIT, f"{file.name} is too large"
    print(file.name)


if __name__ == "__main__":
    main()
