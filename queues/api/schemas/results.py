"""Results: handed in by workers, read by anybody of the tenant."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from queues.api.schemas import LIMITS, NO_NEWLINE, Body, LeaseToken, Moment, Query, TaskId, Text, View
from queues.api.schemas.leases import NewClaims
from queues.api.schemas.tasks import Task
from queues.domain import TaskStatus

# Every white space by its number: Python's `\s` and that of ECMAScript, which the schema is read with, differ.
_SPACE = r"\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
ADDRESS_PATTERN = rf"^https?://(\[[0-9A-Fa-f:.]+\](:[0-9]*)?|[^\[\]/?#{_SPACE}]+)([/?#][^{_SPACE}]*)?" + NO_NEWLINE
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
# Of one result.
ARTIFACTS = 100


class NewArtifact(Body, kw_only=True):
    """Something beside the result: its content, or where it is."""

    name: Annotated[
        str,
        Meta(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*" + NO_NEWLINE, description="Never a path."),
    ]
    url: Annotated[str, Meta(max_length=2048, pattern=ADDRESS_PATTERN)] | None = None
    content_base64: (
        Annotated[
            str,
            Meta(
                max_length=(LIMITS.artifact_bytes + 2) // 3 * 4,
                description=f"At most {LIMITS.artifact_bytes} bytes, decoded.",
                # For whoever reads the schema; here the decoder says it, and sooner.
                extra_json_schema={"contentEncoding": "base64", "pattern": BASE64_PATTERN},
            ),
        ]
        | None
    ) = None
    content_type: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z0-9!#$&^_.+-]{1,64}/[A-Za-z0-9!#$&^_.+-]{1,64}" + NO_NEWLINE,
                description="A media type without parameters.",
            ),
        ]
        | None
    ) = None


class NewResult(Body, kw_only=True):
    """How the work ended."""

    status: Literal["COMPLETED", "FAILED"]
    result: Annotated[
        Raw, Meta(description="Required when COMPLETED.", extra_json_schema={"type": ["object", "null"]})
    ] = msgspec.field(default_factory=Raw)  # a raw value cannot be one of several types: absent is empty
    error: Annotated[Text, Meta(description="Required when FAILED.")] | None = None
    artifacts: Annotated[list[NewArtifact], Meta(max_length=ARTIFACTS)] | None = None
    lease_token: LeaseToken | None = None
    worker_id: Annotated[str | None, Meta(description="Ignored: the token says who the worker is.")] = None


class NewResultOf(NewResult, kw_only=True):
    """How the work on one of several tasks ended."""

    task_id: TaskId


class NewResults(Body, kw_only=True):
    """Results of several tasks, each for itself."""

    results: Annotated[list[NewResultOf], Meta(min_length=1, max_length=LIMITS.batch)]


class Artifact(View, kw_only=True):
    """Something beside the result. A path is of this API, with a token; any other address is the worker's own."""

    name: str
    url: str
    content_type: str | None = None
    size: Annotated[int | None, Meta(description="Bytes, where it is kept here.")] = None


class Result(View, kw_only=True):
    """The stored answer of an ended task: the same on every read."""

    task_id: TaskId
    status: TaskStatus
    result: Raw | None = None
    error: str | None = None
    artifacts: list[Artifact] | None = None
    worker_id: str
    attempts: int
    completed_at: Moment


class SubmittedItem(View, kw_only=True):
    """One answer of a batch: a stored result, or why there is none."""

    task_id: TaskId
    result: Result | None = None
    error: Annotated[str | None, Meta(description="A problem's `code`.", examples=["lease_lost"])] = None
    status: Annotated[int | None, Meta(description="The status that the single call would have had.")] = None
    detail: str | None = None


class SubmittedResults(View, kw_only=True):
    """The answers, in the order of the request."""

    results: list[SubmittedItem]


class NewExchange(NewClaims, kw_only=True):
    """Results to hand in, and what to take next."""

    results: Annotated[list[NewResultOf], Meta(max_length=LIMITS.batch)] = []


class Exchanged(View, kw_only=True):
    """The answers to the results, and the next tasks."""

    results: list[SubmittedItem]
    tasks: list[Task]


class TaskResult(View, kw_only=True):
    """An ended task and its result."""

    task: Task
    result: Result


class ResultQuery(Query, kw_only=True):
    wait_seconds: Annotated[float, Meta(ge=0, le=60, description="How long to wait for the result.")] = 0
