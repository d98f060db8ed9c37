"""The pictures of the docs: `python -m tests.browser.screenshots` starts an installation, fills it and looks at it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from tests.browser import driving
from tests.browser.driving import Site, Watched
from tests.site.conftest import Installation, clean_environment

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 300_000


class Shot(NamedTuple):
    name: str
    theme: str
    size: str
    path: str
    query: dict[str, str]


def shots(acme: str, dead: str, job: str) -> list[Shot]:
    queue = {"tenant": acme, "command": "invoice.render"}
    task = {"tenant": acme, "id": dead}
    insights = {"tenant": acme, "command": "sync-crm"}
    return [
        Shot("overview-light", "light", "desktop", "", {}),
        Shot("overview-dark-phone", "dark", "phone", "", {}),
        Shot("queue-dark", "dark", "desktop", "console/queue/", queue),
        Shot("queue-light-phone", "light", "phone", "console/queue/", queue),
        Shot("task-light", "light", "desktop", "console/task/", task),
        Shot("dead-letters-light", "light", "desktop", "console/dead/", {}),
        Shot("dead-letters-dark-phone", "dark", "phone", "console/dead/", {}),
        Shot("bulk-job-dark", "dark", "desktop", "console/bulk/job/", {"id": job}),
        Shot("insights-light", "light", "desktop", "console/insights/", insights),
        Shot("insights-dark", "dark", "desktop", "console/insights/", insights | {"days": "30"}),
        Shot("insights-light-phone", "light", "phone", "console/insights/", insights),
        Shot("insights-dark-phone", "dark", "phone", "console/insights/", insights | {"days": "30"}),
    ]


def main() -> None:
    room = Path(tempfile.mkdtemp(prefix="codeq-s"))
    installation = Installation(room / "home")
    try:
        installation.start()
        site = Site(installation)
        environment = clean_environment({"CODEQ_HOME": str(installation.home)})
        scene = [sys.executable, "-m", "tests.browser.scene"]
        found = subprocess.run(scene, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
        acme, dead, job = found.stdout.split()
        IMAGES.mkdir(parents=True, exist_ok=True)
        with driving.browser() as browser:
            for shot in shots(acme, dead, job):
                viewport = driving.DESKTOP if shot.size == "desktop" else driving.PHONE
                context = browser.new_context(viewport=viewport, color_scheme=shot.theme, device_scale_factor=1)
                watched = Watched(context, site.base)
                page = watched.log_in("admin", site.admin_password)
                page.goto(f"{site.base}/admin/{shot.path}?{urlencode(shot.query)}")
                page.wait_for_load_state("networkidle")
                file = IMAGES / f"{shot.name}.png"
                page.screenshot(path=file)
                watched.assert_quiet()
                assert file.stat().st_size < MOST_BYTES, f"{file.name} is too large"
                context.close()
                print(file.name)
    finally:
        installation.close()
        shutil.rmtree(room, ignore_errors=True)


if __name__ == "__main__":
    main()
