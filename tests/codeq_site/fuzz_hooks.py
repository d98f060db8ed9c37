"""What schemathesis is told of the API: nothing leaves this machine, no wait is long, and what differs on purpose.

Run by schemathesis in a process of its own, without Django.
"""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis

# Where every callback goes, instead of to hosts that happen to have the names a fuzzer thinks of.
SINK = os.environ["CODEQ_FUZZ_SINK"]
CALLBACK = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?][!\"$-\[\]-~]*)?")
# Long polls are tested elsewhere; here they would take the time of everything else.
WAIT_SECONDS = 0.05


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if isinstance(case.query, dict) and "waitSeconds" in case.query:
        case.query["waitSeconds"] = _shorter(case.query["waitSeconds"])
    if isinstance(case.body, dict):
        _tame(case.body)
        tasks = case.body.get("tasks")
        for each in tasks if isinstance(tasks, list) else ():
            if isinstance(each, dict):
                _tame(each)


def _tame(body: dict[str, Any]) -> None:
    if "waitSeconds" in body:
        body["waitSeconds"] = _shorter(body["waitSeconds"])
    for name in ("webhook", "callbackUrl"):
        value = body.get(name)
        if isinstance(value, str) and len(value) <= 2048 and CALLBACK.fullmatch(value):
            body[name] = SINK


def _shorter(value: Any) -> Any:
    """A good wait, in the form it came in; whatever is wrong with another one stays."""
    try:
        is_long = not isinstance(value, bool) and WAIT_SECONDS < float(value) <= 60
    except (TypeError, ValueError):
        return value
    return (str(WAIT_SECONDS) if isinstance(value, str) else WAIT_SECONDS) if is_long else value


# What the schema allows and a 400 refuses, by how the refusal begins; each with why no schema can say it.
REFUSED_ON_PURPOSE = {
    "cursor: ": "a cursor is opaque: only what a page gave is one",
    "jsonPath: ": "PostgreSQL says what a JSON path is; its grammar is no regular one",
    "priority: ": "a queue's policy may narrow the priorities, and it is put while this runs",
    "deadLetterTopicRef: ": "another topic than the one in the path: a schema cannot compare them",
    "error: there is no word in it": "what a word is, Unicode says",
    "text: there is no word in it": "the same",
    "q: there is no word in it": "the same",
    "filter.command: the path says another": "a schema cannot compare them",
    "filter: ": "a filter that can mean nothing, as the moments or numbers in it exclude each other",
    "groupId: ": "the worker's token names its group",
    "artifacts: url is not an address": "a port beyond 65535, an IPv6 address that is none",
    "Nested deeper than 100 levels": "a schema has no depth",
    "runAt: at most ": "the horizon moves with the clock",
    "from, to: ": "at most so many days, and both or neither: a schema cannot count them",
    "from: the day before": "a schema cannot compare them",
    "command: this mart": "which marts know commands depends on the path",
    "createdAfter: not a moment in time": "a date-time whose day does not exist, or a leap second",
}
# DELETE there ends the work and not the record of it: GET answers with the state CANCELLED, as it should.
ENDED_AND_KEPT = ("DELETE /v1/codeq/tasks/", "DELETE /v1/codeq/admin/bulk/")
# Answer 200 and refuse inside: each item of a batch is for itself, so that one bad item stops no other.
BATCHES = ("/v1/codeq/tasks/batch", "/v1/codeq/tasks/batch/results", "/v1/codeq/tasks/exchange")


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext, failure: Any, case: schemathesis.Case, response: schemathesis.Response
) -> bool:
    """Whether it is one: every check is on, and what differs on purpose is let go one by one."""
    (check, *_) = failure.checks or ("",)
    if check == "positive_data_acceptance" and response.status_code == 400:
        said = response.json()["detail"]
        return not any(said.startswith(start) for start in REFUSED_ON_PURPOSE)
    if check == "negative_data_rejection" and case.path in BATCHES and response.status_code == 200:
        return not any(item.get("status") == 400 for item in response.json()["results"])
    if check == "use_after_free":
        return not failure.free.startswith(ENDED_AND_KEPT)
    return True
