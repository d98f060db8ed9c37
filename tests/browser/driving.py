"""Debian's chromium, driven; and the running installation it looks at, spoken to as workers and operators do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.codeq_site.installation import Installation, clean_environment
from tests.waiting import until

# A browser that talks to nobody but us.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
# Until when the slowest machine shows what is to be seen; only a test that fails waits so long.
SEEN = 30_000
PASSWORD = "a-password-of-the-browsers-tests"


def chromium() -> str | None:
    """Where it is, if it is there."""
    return os.environ.get("CODEQ_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Without a profile of its own playwright makes a new one, and removes it.
        started = playwright.chromium.launch(executable_path=chromium(), args=FLAGS, headless=True)
        yield started
        started.close()


class Watched:
    """A tab that remembers what must not happen: an error on the console, a word to another host."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.base = base
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._heed(request.url))

    def _heed(self, url: str) -> None:
        if not url.startswith((f"{self.base}/", "data:", "blob:")):
            self.strangers.append(url)

    def assert_quiet(self) -> None:
        assert self.errors == []
        assert self.strangers == []

    def log_in(self, username: str, password: str) -> Page:
        self.page.goto(f"{self.base}/admin/login/")
        self.page.fill("#id_username", username)
        self.page.fill("#id_password", password)
        self.page.press("#id_password", "Enter")
        self.page.wait_for_url(f"{self.base}/admin/")
        return self.page


class Site:
    """The running installation: its API as producers and workers use it, its rows as `manage.py` makes them."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.base = installation.base
        self._tokens: dict[tuple[str, str], str] = {}

    def manage(self, *words: str) -> str:
        command = [sys.executable, "-W", "ignore", str(settings.BASE_DIR / "manage.py"), *words]
        environment = clean_environment({"CODEQ_HOME": str(self.installation.home)})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def token(self, tenant: str, role: str) -> str:
        key = (tenant, role)
        if key not in self._tokens:
            self._tokens[key] = self.manage("token", "--tenant", tenant, "--role", role)
        return self._tokens[key]

    def call(self, tenant: str, role: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.base}/v1/codeq/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token(tenant, role)}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                found: dict[str, Any] = json.loads(answer.read() or b"{}")
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error

    def enqueue(self, tenant: str, command: str, payload: Any, **asked: Any) -> str:
        task = self.call(tenant, "producer", "tasks", {"command": command, "payload": payload, **asked})
        return str(task["id"])

    def claim(self, tenant: str, command: str) -> dict[str, Any]:
        return self.call(tenant, "worker", "tasks/claim", {"commands": [command], "waitSeconds": 5})

    def complete(self, tenant: str, task_id: str, result: dict[str, Any]) -> None:
        self.call(tenant, "worker", f"tasks/{task_id}/result", {"status": "COMPLETED", "result": result})

    def die(self, tenant: str, command: str, payloads: Sequence[Any], error: str) -> list[str]:
        """Tasks that are tried once and fail; the audit knows of them when this returns."""
        ids: list[str] = []
        for at in range(0, len(payloads), 100):
            batch = [{"command": command, "payload": each, "maxAttempts": 1} for each in payloads[at : at + 100]]
            self.call(tenant, "producer", "tasks/batch", {"tasks": batch})
        while len(ids) < len(payloads):
            asked = {"commands": [command], "count": 10}
            for task in self.call(tenant, "worker", "tasks/claim/batch", asked)["tasks"]:
                self.call(tenant, "worker", f"tasks/{task['id']}/nack", {"reason": error})
                ids.append(task["id"])
        until(lambda: set(ids) <= self.dead(tenant, command), 60, every=0.05)
        return ids

    def dead(self, tenant: str, command: str) -> set[str]:
        """The ids of a queue's newest dead letters."""
        return {each["id"] for each in self.call(tenant, "admin", f"admin/dlq/{command}?limit=100")["deadLetters"]}

    def person(self, username: str, tenant: str, role: str) -> str:
        """A member of staff with this role for the tenant, who logs in with PASSWORD."""
        self.manage(
            "shell",
            "-v0",
            "-c",
            "from django.contrib.auth.models import User; from tenants.models import Tenant, TenantMembership;"
            f"user = User.objects.create_user({username!r}, password={PASSWORD!r}, is_staff=True);"
            f"TenantMembership.objects.create(user=user, role={role!r}, tenant=Tenant.objects.get(slug={tenant!r}))",
        )
        return username

    def tid(self, tenant: str) -> str:
        self.token(tenant, "producer")
        words = f"from tenants.models import Tenant; print(Tenant.objects.get(slug={tenant!r}).tid)"
        return self.manage("shell", "-v0", "-c", words).splitlines()[-1]

    @property
    def admin_password(self) -> str:
        return (self.installation.home / "admin_password").read_text().strip()
