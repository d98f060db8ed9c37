"""Control of chromium with Playwright, and of the running installation through its API."""

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

# The browser resolves no host but the loopback address.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
# The timeout for elements to appear, sufficient for slow machines. Only a failing test waits this long.
VISIBLE_TIMEOUT_MS = 30_000
PASSWORD = "a-password-of-the-browser-tests"


def find_chromium() -> str | None:
    """Return the path of chromium, if it is installed."""
    return os.environ.get("CODEQ_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launch_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Playwright creates a temporary profile and deletes it.
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS, headless=True)
        yield browser
        browser.close()


class WatchedTab:
    """A tab that records errors on its console and requests to other hosts."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.foreign_requests: list[str] = []
        self.base = base
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._check_host(request.url))

    def _check_host(self, url: str) -> None:
        if not url.startswith((f"{self.base}/", "data:", "blob:")):
            self.foreign_requests.append(url)

    def assert_no_errors(self) -> None:
        assert self.errors == []
        assert self.foreign_requests == []

    def log_in(self, username: str, password: str) -> Page:
        self.page.goto(f"{self.base}/admin/login/")
        self.page.fill("#id_username", username)
        self.page.fill("#id_password", password)
        self.page.press("#id_password", "Enter")
        self.page.wait_for_url(f"{self.base}/admin/")
        return self.page


class Site:
    """The running installation: its API, and rows made by `manage.py`."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.base = installation.base
        self._tenants: dict[str, dict[str, str]] = {}

    def manage(self, *arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", str(settings.BASE_DIR / "manage.py"), *arguments]
        environment = clean_environment({"CODEQ_HOME": str(self.installation.home)})
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.strip()

    def shell(self, code: str) -> str:
        """Run this code in the installation's shell and return what it prints."""
        return self.manage("shell", "-v0", "-c", code)

    def _prepare_tenant(self, tenant: str) -> dict[str, str]:
        """Create the tenant at its first use. Return its id as "tid", and a token for each role."""
        if tenant not in self._tenants:
            printed = self.shell(
                "import json; from tenants.domain import CallerRole; from tenants.models import Tenant;"
                "from tenants.services import issue_token;"
                f"tokens = {{str(role): issue_token({tenant!r}, role) for role in CallerRole}};"
                f"print(json.dumps(tokens | {{'tid': str(Tenant.objects.get(slug={tenant!r}).tid)}}))"
            )
            self._tenants[tenant] = json.loads(printed.splitlines()[-1])
        return self._tenants[tenant]

    def token(self, tenant: str, role: str) -> str:
        return self._prepare_tenant(tenant)[role]

    def call(self, tenant: str, role: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.base}/v1/codeq/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token(tenant, role)}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                content: dict[str, Any] = json.loads(response.read() or b"{}")
                return content
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error

    def enqueue(self, tenant: str, command: str, payload: Any, **fields: Any) -> str:
        task = self.call(tenant, "producer", "tasks", {"command": command, "payload": payload, **fields})
        return str(task["id"])

    def claim(self, tenant: str, command: str) -> dict[str, Any]:
        return self.call(tenant, "worker", "tasks/claim", {"commands": [command], "waitSeconds": 5})

    def complete(self, tenant: str, task_id: str, result: dict[str, Any]) -> None:
        self.call(tenant, "worker", f"tasks/{task_id}/result", {"status": "COMPLETED", "result": result})

    def create_dead_letters(self, tenant: str, command: str, payloads: Sequence[Any], error: str) -> list[str]:
        """Create tasks with one attempt, fail them, and wait until they are in the audit."""
        ids: list[str] = []
        for start in range(0, len(payloads), 100):
            batch = [
                {"command": command, "payload": payload, "maxAttempts": 1} for payload in payloads[start : start + 100]
            ]
            self.call(tenant, "producer", "tasks/batch", {"tasks": batch})
        while len(ids) < len(payloads):
            claim = {"commands": [command], "count": 10}
            for task in self.call(tenant, "worker", "tasks/claim/batch", claim)["tasks"]:
                self.call(tenant, "worker", f"tasks/{task['id']}/nack", {"reason": error})
                ids.append(task["id"])
        until(lambda: set(ids) <= self.list_dead_letters(tenant, command), 60, every=0.05)
        return ids

    def list_dead_letters(self, tenant: str, command: str) -> set[str]:
        """Return the ids of a queue's newest dead letters."""
        page = self.call(tenant, "admin", f"admin/dlq/{command}?limit=100")
        return {letter["id"] for letter in page["deadLetters"]}

    def create_user(self, username: str, tenant: str, role: str) -> str:
        """Create a member of staff with this role in the tenant and PASSWORD as the password."""
        self.shell(
            "from django.contrib.auth.models import User; from tenants.models import Tenant, TenantMembership;"
            f"user = User.objects.create_user({username!r}, password={PASSWORD!r}, is_staff=True);"
            f"TenantMembership.objects.create(user=user, role={role!r}, tenant=Tenant.objects.get(slug={tenant!r}))",
        )
        return username

    def find_tid(self, tenant: str) -> str:
        return self._prepare_tenant(tenant)["tid"]

    @property
    def admin_password(self) -> str:
        return (self.installation.home / "admin_password").read_text().strip()
