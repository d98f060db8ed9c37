"""The text that `manage.py up` prints when codeQ is ready: URLs, logins, a first task."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from codeq_site.devserver.bootstrap import ADMIN, TENANT, BootstrapResult

# The second request writes its response to this file, and the third reads the task's id from it.
CLAIM_FILE = "/tmp/codeq-task.json"  # noqa: S108  (the reader's own shell writes and reads it)


def banner_text(base: str, home: Path, created: BootstrapResult, *, has_logs: bool) -> str:
    lines = ["", "codeQ is ready.", "", f"  API docs  {base}/api/docs/"]
    if created.has_admin:
        lines.append(f"  Admin     {base}/admin/   user {ADMIN}, password {created.password or 'as you set it'}")
    else:
        lines.append(f"  Admin     {base}/admin/")
    lines += [f"  Metrics   {base}/metrics", f"  State     {home}{' (logs in log/)' if has_logs else ''}", ""]
    if created.producer:
        lines += [f"Tokens of tenant {TENANT}, valid for 24 hours:", ""]
        lines += [f"  producer  {created.producer}", f"  worker    {created.worker}", ""]
        lines += ["To run a first task, paste these lines into another terminal. They return 202, 200 and 200:", ""]
        lines += [*curl_lines(base, created), "", "docs/tutorial.md continues from here.", ""]
    return "\n".join([*lines, "Ctrl-C stops everything; the state is kept."])


def curl_lines(base: str, created: BootstrapResult) -> list[str]:
    """Return shell commands that enqueue a task, claim it and submit its result."""
    claimed_id = f'$(sed -n \'s/.*"id":"\\([^"]*\\)".*/\\1/p\' {CLAIM_FILE})'

    def line(path: str, token: str, body: dict[str, Any]) -> str:
        return (
            f"curl -sS -w '\\n%{{http_code}}\\n' \"{base}/v1/codeq/{path}\" -H 'Content-Type: application/json' "
            f"-H 'Authorization: Bearer {token}' -d {shlex.quote(json.dumps(body))}"
        )

    return [
        line("tasks", created.producer, {"command": "greet", "payload": {"whom": "world"}}),
        line("tasks/claim", created.worker, {"commands": ["greet"], "waitSeconds": 5}) + f" | tee {CLAIM_FILE}",
        line(f"tasks/{claimed_id}/result", created.worker, {"status": "COMPLETED", "result": {"text": "Hello, world"}}),
    ]
