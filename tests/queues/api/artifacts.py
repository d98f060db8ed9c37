"""Bodies of submissions that have artifacts."""

from __future__ import annotations

import base64
from typing import Any

CONTENT = bytes(range(256)) * 400


def inline_artifact(content: bytes = CONTENT, name: str = "out.bin", **fields: Any) -> dict[str, Any]:
    return {"name": name, "contentBase64": base64.b64encode(content).decode(), **fields}


def result_with(*artifacts: dict[str, Any]) -> dict[str, Any]:
    """Return the body that completes a task with these artifacts."""
    return {"status": "COMPLETED", "result": {}, "artifacts": list(artifacts)}
