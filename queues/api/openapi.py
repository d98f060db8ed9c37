"""Parts of the OpenAPI document that the schemas of the queue API cannot express."""

from __future__ import annotations

from typing import Any

from core.http import openapi
from queues.api.examples import EXAMPLES
from queues.api.links import LINKS

# Rules about several fields together.
NOT_NULL = {"not": {"type": "null"}}
RESULT_RULES = [
    {
        "if": {"properties": {"status": {"const": status}}},
        "then": {"required": [field], "properties": {field: NOT_NULL}},
    }
    for status, field in (("COMPLETED", "result"), ("FAILED", "error"))
]
ONE_OF_TWO = [{"required": [field], "properties": {field: NOT_NULL}} for field in ("url", "contentBase64")]
RULES: dict[str, dict[str, Any]] = {
    "NewResult": {"allOf": RESULT_RULES},
    "NewResultOf": {"allOf": RESULT_RULES},
    "NewArtifact": {"oneOf": ONE_OF_TWO},
    "NewReplay": {"not": {"required": ["ids", "filter"], "properties": {"ids": NOT_NULL, "filter": NOT_NULL}}},
}

PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "task_id": {"type": "string", "format": "uuid", "description": "The id of the task."},
    "artifact_id": {
        "type": "string",
        "pattern": "^[0-9a-f]{64}$",
        "description": "The last part of the artifact's `url`.",
    },
    "job_id": {"type": "string", "format": "uuid", "description": "The id of the bulk job."},
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$", "description": "The name of the queue."},
    "command": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$", "description": "The name of the queue."},
}

openapi.register(examples=EXAMPLES, links=LINKS, rules=RULES, path_schemas=PATH_SCHEMAS)
