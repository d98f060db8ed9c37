"""The pictures of the docs: `python -m tests.browser.screenshots` starts an installation, fills it and looks at it.

Every page, light and dark, on a desktop and on a phone; with words after it, only the pages of these names.
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

from tests.browser import driving
from tests.browser.driving import Site, Watched
from tests.codeq_site.installation import Installation, clean_environment

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000
# As many as a page of ours has, shades of letters included; a third of the bytes.
COLOURS = 128
VIEWS = [
    (f"{theme}{suffix}", theme, size)
    for theme in ("light", "dark")
    for suffix, size in (("", driving.DESKTOP), ("-phone", driving.PHONE))
]


def pages(found: dict[str, str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Name -> path and query. The job that is half done comes first, while it is."""
    acme = {"tenant": found["acme"]}
    return {
        "bulk-job": ("console/bulk/job/", {"id": found["job"]}),
        "bulk-job-over": ("console/bulk/job/", {"id": found["over"]}),
        "bulk-job-failed": ("console/bulk/job/", {"id": found["failed"]}),
        "bulk-jobs": ("console/bulk/", {}),
        "bulk-new": ("console/bulk/new/", acme),
        "overview": ("", {}),
        "queue": ("console/queue/", {**acme, "command": "invoice.render"}),
        "tasks": ("console/tasks/", {"q": "worker-7"}),
        "task": ("console/task/", {**acme, "id": found["dead"]}),
        "task-done": ("console/task/", {**acme, "id": found["done"]}),
        "task-waiting": ("console/task/", {**acme, "id": found["waiting"]}),
        "dead-letters": ("console/dead/", {}),
        "dead-letters-list": ("console/dead/list/", acme),
        "insights": ("console/insights/", {**acme, "command": "sync-crm", "days": "30"}),
        "tenants": ("tenants/tenant/", {}),
        "tenant": (f"tenants/tenant/{found['acme']}/change/", {}),
        "tenant-history": (f"tenants/tenant/{found['acme']}/history/", {}),
        "memberships": ("tenants/tenantmembership/", {}),
        "issuers": ("tenants/tenantissuer/", {}),
        "signing-secrets": ("tenants/signingsecret/", {}),
        "operators-actions": ("admin/logentry/", {}),
        "audited-results": ("queues/auditedresult/", {}),
        "audited-result": (f"queues/auditedresult/{found['done']}/change/", {}),
        "attempts": ("queues/attempt/", {}),
        "policies": ("queues/queuepolicy/", {}),
        "deliveries": ("webhooks/delivery/", {}),
        "delivery": (f"webhooks/delivery/{found['delivery']}/change/", {}),
        "endpoints": ("webhooks/endpoint/", {}),
        "subscriptions": ("webhooks/subscription/", {}),
        "circuits": ("webhooks/circuit/", {}),
        "beat-jobs": ("queues/beatjob/", {}),
        "quarantine": ("queues/quarantine/", {}),
        "people": ("auth/user/", {}),
    }


def main() -> None:
    room = Path(tempfile.mkdtemp(prefix="codeq-s"))
    installation = Installation(room / "home")
    try:
        installation.start()
        environment = clean_environment({"CODEQ_HOME": str(installation.home)})
        scene = [sys.executable, "-m", "tests.browser.scene"]
        said = subprocess.run(scene, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
        IMAGES.mkdir(parents=True, exist_ok=True)
        with driving.browser() as browser:
            look(browser, Site(installation), pages(json.loads(said.stdout)), set(sys.argv[1:]))
    finally:
        installation.close()
        shutil.rmtree(room, ignore_errors=True)


def look(browser: Browser, site: Site, seen: dict[str, tuple[str, dict[str, str]]], only: set[str]) -> None:
    tabs = {view: enter(browser, site, theme, size) for view, theme, size in VIEWS}
    for name, (path, query) in seen.items():
        for view, tab in tabs.items():
            if not only or name in only:
                tab.page.goto(f"{site.base}/admin/{path}?{urlencode(query)}")
                tab.page.wait_for_load_state("networkidle")
                keep(tab.page, IMAGES / f"{name}-{view}.png")
    for tab in tabs.values():
        tab.assert_quiet()
    if not only:
        for file in set(IMAGES.glob("*.png")) - {IMAGES / f"{name}-{view}.png" for name in seen for view in tabs}:
            print(f"{file.name} shows no page of these any more")


def enter(browser: Browser, site: Site, theme: Any, size: Any) -> Watched:
    watched = Watched(browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1), site.base)
    watched.log_in("admin", site.admin_password)
    return watched


def keep(page: Page, file: Path) -> None:
    with Image.open(io.BytesIO(page.screenshot())) as taken:
        taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    assert file.stat().st_size < MOST_BYTES, f"{file.name} is too large"
    print(file.name)


if __name__ == "__main__":
    main()
