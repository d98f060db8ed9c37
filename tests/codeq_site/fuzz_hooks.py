"""Hooks for schemathesis: local callbacks, short waits, known differences.

Schemathesis runs them in a separate process without Django.
"""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis

# The receiver of all callbacks, instead of real hosts whose names a fuzzer may generate.
SINK = os.environ["CODEQ_FUZZ_SINK"]
CALLBACK = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?][!\"$-\[\]-~]*)?")
# Other tests cover long polls. Here they would use up the time of the run.
WAIT_SECONDS = 0.05


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if isinstance(case.query, dict) and "waitSeconds" in case.query:
        case.query["waitSeconds"] = _shorten(case.query["waitSeconds"])
    if isinstance(case.body, dict):
        _make_harmless(case.body)
        tasks = case.body.get("tasks")
        for task in tasks if isinstance(tasks, list) else ():
            if isinstance(task, dict):
                _make_harmless(task)


def _make_harmless(body: dict[str, Any]) -> None:
    if "waitSeconds" in body:
        body["waitSeconds"] = _shorten(body["waitSeconds"])
    for name in ("webhook", "callbackUrl"):
        value = body.get(name)
        if isinstance(value, str) and len(value) <= 2048 and CALLBACK.fullmatch(value):
            body[name] = SINK


def _shorten(value: Any) -> Any:
    """Shorten a valid wait and keep its type. Return an invalid value unchanged."""
    try:
        is_long = not isinstance(value, bool) and WAIT_SECONDS < float(value) <= 60
    except (TypeError, ValueError):
        return value
    return (str(WAIT_SECONDS) if isinstance(value, str) else WAIT_SECONDS) if is_long else value


# Requests that the schema permits and the server refuses with 400: start of the detail -> why a schema cannot express
# the rule.
REFUSED_ON_PURPOSE = {
    "cursor: ": "a cursor is opaque: only one from a page is valid",
    "jsonPath: ": "PostgreSQL defines JSON paths; their grammar is not regular",
    "priority: ": "a queue's policy may restrict the priorities, and the fuzzer sets policies",
    "deadLetterTopicRef: ": "must differ from the topic in the path: a schema cannot compare them",
    "error: must contain a letter or digit": "a pattern of JSON Schema cannot name all letters of Unicode",
    "text: must contain a letter or digit": "the same",
    "q: must contain a letter or digit": "the same",
    "filter.command: must be the queue of the path": "a schema cannot compare them",
    "filter: ": "a filter with times or numbers that exclude each other matches nothing",
    "groupId: ": "the worker's token names its group",
    "artifacts: `url` is not a valid URL": "a port above 65535, an invalid IPv6 address",
    "Nested deeper than 100 levels": "a schema cannot limit depth",
    "runAt: at most ": "the limit depends on the clock",
    "from, to: ": "a limited number of days, and both or neither: a schema cannot count them",
    "from: must be before": "a schema cannot compare them",
    "command: this mart": "the path decides whether a mart has commands",
    "createdAfter: not a time with a zone": "a date-time with a day that does not exist, or a leap second",
}
# DELETE ends the work but keeps its record: GET correctly answers with the state CANCELLED.
ENDED_AND_KEPT = ("DELETE /v1/codeq/tasks/", "DELETE /v1/codeq/admin/bulk/")
# These answer 200 with errors inside: the items of a batch are independent.
BATCHES = ("/v1/codeq/tasks/batch", "/v1/codeq/tasks/batch/results", "/v1/codeq/tasks/exchange")


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Any, case: schemathesis.Case, response: schemathesis.Response
) -> bool:
    """Return whether the failure counts: all do, except the known differences."""
    (check, *_) = failure.checks or ("",)
    if check == "positive_data_acceptance" and response.status_code == 400:
        detail = response.json()["detail"]
        return not any(detail.startswith(start) for start in REFUSED_ON_PURPOSE)
    if check == "negative_data_rejection" and case.path in BATCHES and response.status_code == 200:
        return not any(item.get("status") == 400 for item in response.json()["results"])
    if check == "use_after_free":
        return not failure.free.startswith(ENDED_AND_KEPT)
    return True
