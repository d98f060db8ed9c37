"""Results: submitted by workers, and read by producers and workers of the tenant."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from queues.api.schemas import (
    LIMITS,
    NO_NEWLINE,
    LeaseToken,
    Moment,
    QueryParameters,
    RequestBody,
    ResponseBody,
    TaskId,
    Text,
)
from queues.api.schemas.leases import ExchangeCount, NewClaim
from queues.api.schemas.tasks import Task
from queues.domain import TaskStatus

# White space by code point: `\s` differs between Python and ECMAScript, whose rules apply to JSON Schema.
_SPACE = r"\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
ARTIFACT_URL_PATTERN = rf"^https?://(\[[0-9A-Fa-f:.]+\](:[0-9]*)?|[^\[\]/?#{_SPACE}]+)([/?#][^{_SPACE}]*)?" + NO_NEWLINE
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
# Artifacts of one result.
MAX_ARTIFACTS = 100


class NewArtifact(RequestBody, kw_only=True):
    """A file to submit with the result: its content, or its URL."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=255,
            pattern=r"^[^\x00-\x1f\x7f]*" + NO_NEWLINE,
            description="The file's name. It is never used as a path.",
        ),
    ]
    url: (
        Annotated[
            str,
            Meta(
                max_length=2048,
                pattern=ARTIFACT_URL_PATTERN,
                description="The URL of a file that is stored elsewhere. It is returned unchanged.",
            ),
        ]
        | None
    ) = None
    content_base64: (
        Annotated[
            str,
            Meta(
                max_length=(LIMITS.artifact_bytes + 2) // 3 * 4,
                description=f"The content as base64. At most {LIMITS.artifact_bytes} bytes after decoding.",
                # Documentation only: the decoder checks it faster than a pattern.
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


class NewResult(RequestBody, kw_only=True):
    """The result of a task."""

    status: Literal["COMPLETED", "FAILED"]
    result: Annotated[
        Raw, Meta(description="Required if `status` is `COMPLETED`.", extra_json_schema={"type": ["object", "null"]})
    ] = msgspec.field(default_factory=Raw)  # msgspec allows no union with Raw, so an empty value stands for absent
    error: Annotated[Text, Meta(description="Why the task failed. Required if `status` is `FAILED`.")] | None = None
    artifacts: Annotated[list[NewArtifact], Meta(max_length=MAX_ARTIFACTS)] | None = None
    lease_token: LeaseToken | None = None
    worker_id: Annotated[str | None, Meta(description="Ignored: the token identifies the worker.")] = None


class NewResultOf(NewResult, kw_only=True):
    """The result of one task of a batch."""

    task_id: TaskId


class NewResults(RequestBody, kw_only=True):
    """Independent results of several tasks."""

    results: Annotated[list[NewResultOf], Meta(min_length=1, max_length=LIMITS.batch)]


class Artifact(ResponseBody, kw_only=True):
    """A file of a result.

    A relative URL is a path of this API; a request to it needs a token. An absolute URL was submitted by the worker.
    """

    name: str
    url: str
    content_type: str | None = None
    size: Annotated[int | None, Meta(description="Bytes, if this service stores the file.")] = None


class Result(ResponseBody, kw_only=True):
    """The result of an ended task. It never changes."""

    task_id: TaskId
    status: TaskStatus
    result: Raw | None = None
    error: str | None = None
    artifacts: list[Artifact] | None = None
    worker_id: str
    attempts: Annotated[int, Meta(description="Failed attempts.")]
    completed_at: Moment


class SubmittedItem(ResponseBody, kw_only=True):
    """The answer for one result of a batch: the stored result, or an error."""

    task_id: TaskId
    result: Result | None = None
    error: Annotated[
        str | None, Meta(description="The `code` of the error, if the result was refused.", examples=["lease_lost"])
    ] = None
    status: Annotated[int | None, Meta(description="The HTTP status of the error.")] = None
    detail: Annotated[str | None, Meta(description="The text of the error.")] = None


class SubmittedResults(ResponseBody, kw_only=True):
    """One answer for each result, in the order of the request."""

    results: list[SubmittedItem]


class NewExchange(NewClaim, kw_only=True):
    """Results to submit, and a claim of the next tasks."""

    count: ExchangeCount | None = None
    results: Annotated[list[NewResultOf], Meta(max_length=LIMITS.batch)] = []


class Exchanged(ResponseBody, kw_only=True):
    """The answers to the results, and the next tasks."""

    results: list[SubmittedItem]
    tasks: list[Task]


class TaskResult(ResponseBody, kw_only=True):
    """An ended task and its result."""

    task: Task
    result: Result


class ResultQuery(QueryParameters, kw_only=True):
    """The time to wait for a result."""

    wait_seconds: Annotated[
        float, Meta(ge=0, le=60, description="Seconds to wait for the result if there is none.")
    ] = 0
