"""What a newcomer is shown once everything runs: where things are, who may enter, and three lines to try."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from codeq_site.devserver.bootstrap import ADMIN, TENANT, BootstrapResult

# Where the claimed task is handed from the second line to the third, so that each line stands alone.
CLAIMED = "/tmp/codeq-task.json"  # noqa: S108  (the newcomer's own shell writes and reads it)


def banner_text(base: str, home: Path, seeded: BootstrapResult, *, has_logs: bool) -> str:
    lines = ["", "codeQ is ready.", "", f"  API docs  {base}/api/docs/"]
    if seeded.has_admin:
        lines.append(f"  Admin     {base}/admin/   user {ADMIN}, password {seeded.password or 'as you have set it'}")
    else:
        lines.append(f"  Admin     {base}/admin/")
    lines += [f"  Metrics   {base}/metrics", f"  State     {home}{' (logs in log/)' if has_logs else ''}", ""]
    if seeded.producer:
        lines += [f"Tokens of tenant {TENANT}, good for 24 hours:", ""]
        lines += [f"  producer  {seeded.producer}", f"  worker    {seeded.worker}", ""]
        lines += ["A task's whole way, to paste into another terminal; they answer 202, 200 and 200:", ""]
        lines += [*curl_lines(base, seeded), "", "docs/tutorial.md goes on from there.", ""]
    return "\n".join([*lines, "Ctrl-C stops everything; nothing is lost."])


def curl_lines(base: str, seeded: BootstrapResult) -> list[str]:
    """Enqueue, claim, result: with curl and sed, which every machine has."""
    claimed_id = f'$(sed -n \'s/.*"id":"\\([^"]*\\)".*/\\1/p\' {CLAIMED})'

    def line(path: str, token: str, body: dict[str, Any]) -> str:
        return (
            f"curl -sS -w '\\n%{{http_code}}\\n' \"{base}/v1/codeq/{path}\" -H 'Content-Type: application/json' "
            f"-H 'Authorization: Bearer {token}' -d {shlex.quote(json.dumps(body))}"
        )

    return [
        line("tasks", seeded.producer, {"command": "greet", "payload": {"whom": "world"}}),
        line("tasks/claim", seeded.worker, {"commands": ["greet"], "waitSeconds": 5}) + f" | tee {CLAIMED}",
        line(f"tasks/{claimed_id}/result", seeded.worker, {"status": "COMPLETED", "result": {"text": "Hello, world"}}),
    ]
