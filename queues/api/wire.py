"""The wire types: what a request may say and what an answer says. They are the contract; the schema is made of them.

Unknown fields are refused, a bool is no number, a time has a zone. Of a key that comes twice in one object the last
one counts, as in every JSON library a client is likely to use; inside a payload both are kept.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from codeq_site import errors
from codeq_site.conf import conf
from queues import task as nouns
from queues.task import Location, Status

LIMITS = conf().queues
# `$` also matches before a last newline, which must not get into a key; no client can say what these refuse.
NO_NEWLINE = r"(?!\n)$"
COMMAND_PATTERN = r"^[A-Za-z0-9_.-]{1,128}" + NO_NEWLINE
UUID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}" + NO_NEWLINE
is_task_id = re.compile(UUID_PATTERN).match
# PostgreSQL takes no NUL in a text, so one accepted here would stop the audit later.
NO_NUL = r"^[^\x00]*$"

PAYLOAD_DEPTH = 100
TEXT_CHARACTERS = 16_384
UTC = dt.UTC

Command = Annotated[
    str, Meta(pattern=COMMAND_PATTERN, description="The queue inside the tenant.", examples=["RENDER_VIDEO"])
]
TaskId = Annotated[
    str, Meta(pattern=UUID_PATTERN, description="UUID v7.", examples=["01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"])
]
Priority = Annotated[int, Meta(ge=0, le=9, description="Higher goes first.")]
LeaseToken = Annotated[
    str,
    Meta(min_length=1, max_length=128, pattern=r"^[ -~]+$", description="The `leaseToken` the claim gave."),
]
LeaseSeconds = Annotated[
    int,
    Meta(
        ge=1,
        le=LIMITS.lease_limit_seconds,
        description=f"How long the lease lasts. {LIMITS.lease_seconds} if absent.",
    ),
]
WaitSeconds = Annotated[float, Meta(ge=0, le=30, description="How long to wait for a task before the answer is 204.")]
Count = Annotated[int, Meta(ge=1, le=LIMITS.claim_batch, description="The most tasks to take.")]
Moment = Annotated[dt.datetime, Meta(tz=True)]
Text = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARACTERS, pattern=NO_NUL)]


class Body(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a client sends."""


class View(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """What we answer. Fields without a value are left out."""


# Producer


class NewTask(Body, kw_only=True):
    """A task to put on a queue."""

    command: Command
    payload: Annotated[
        Raw,
        Meta(
            description="Any JSON value but null; kept byte-exact, without the spaces.",
            extra_json_schema={"not": {"type": "null"}},
        ),
    ]
    priority: Priority = 0
    max_attempts: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=LIMITS.max_attempts_limit,
                description=f"Deliveries in all. {LIMITS.max_attempts} if absent.",
            ),
        ]
        | None
    ) = None
    webhook: (
        Annotated[
            str,
            Meta(
                max_length=2048,
                pattern=r"^https?://[^\s\x00-\x20\x7f]+" + NO_NEWLINE,
                description="Called when the task has ended.",
                examples=["https://example.org/codeq/hook"],
            ),
        ]
        | None
    ) = None
    idempotency_key: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=255,
                pattern=r"^[ -~]+" + NO_NEWLINE,
                description="The same key inside the retention window stands for the same task.",
            ),
        ]
        | None
    ) = None
    run_at: (
        Annotated[dt.datetime, Meta(tz=True, description="Not before this moment; wins over `delaySeconds`.")] | None
    ) = None
    delay_seconds: (
        Annotated[float, Meta(ge=0, le=LIMITS.horizon_seconds, description="Not before so many seconds from now.")]
        | None
    ) = None


class NewTasks(Body, kw_only=True):
    """Tasks to put on queues, each for itself."""

    tasks: Annotated[list[NewTask], Meta(min_length=1, max_length=LIMITS.batch)]


class Task(View, kw_only=True):
    """A task."""

    id: TaskId
    command: Command
    payload: Annotated[str, Meta(description="The payload as compact JSON text.")]
    priority: int
    status: Status
    attempts: Annotated[int, Meta(description="Ended attempts without success.")]
    max_attempts: int
    webhook: str | None = None
    worker_id: str | None = None
    lease_until: Moment | None = None
    lease_token: Annotated[
        str | None, Meta(description="Only in the answer to a claim: proves this lease, and no other one.")
    ] = None
    error: Annotated[str | None, Meta(description="Why the last attempt failed.")] = None
    progress: Annotated[Raw | None, Meta(description="What the worker's last heartbeat said of its progress.")] = None
    result_key: Annotated[str | None, Meta(description="Where the result is.")] = None
    tenant_id: str
    trace_parent: str | None = None
    trace_state: str | None = None
    created_at: Moment
    updated_at: Moment
    visible_at: Annotated[Moment | None, Meta(description="A delayed task is not claimed before.")] = None
    last_known_location: Location | None = None


class EnqueuedItem(View, kw_only=True):
    """One answer of a batch: a task, or why there is none."""

    task: Task | None = None
    error: Annotated[str | None, Meta(description="A problem's `code`.", examples=["payload_too_large"])] = None
    status: Annotated[int | None, Meta(description="The status that the single call would have had.")] = None
    detail: str | None = None
    is_replayed: Annotated[bool, Meta(description="The idempotency key had made this task before.")] = False
    is_mismatch: Annotated[bool, Meta(description="… and from another body.")] = False


class EnqueuedTasks(View, kw_only=True):
    """The answers, in the order of the request."""

    results: list[EnqueuedItem]


# Worker


class NewClaim(Body, kw_only=True):
    """What to take."""

    commands: Annotated[
        list[Command],
        Meta(max_length=100, description="A part of the token's `eventTypes`. All of them if absent or empty."),
    ] = []
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: WaitSeconds = 0


class NewClaims(NewClaim, kw_only=True):
    """What to take, several at once."""

    count: Count | None = None


class Tasks(View, kw_only=True):
    """Claimed tasks, the first to run first."""

    tasks: list[Task]


class Progress(Body, kw_only=True):
    """How far the work is."""

    percent: Annotated[float, Meta(ge=0, le=100)]
    note: Annotated[str, Meta(max_length=1024, pattern=NO_NUL)] | None = None


class Heartbeat(Body, kw_only=True):
    """Keep the lease."""

    extend_seconds: LeaseSeconds | None = None
    lease_token: LeaseToken | None = None
    progress: Annotated[float, Meta(ge=0, le=100)] | Progress | None = None


class Extended(View, kw_only=True):
    """The lease goes on."""

    ok: Literal[True]
    lease_until: Moment


class Abandon(Body, kw_only=True):
    """Give the task back."""

    lease_token: LeaseToken | None = None


class Nack(Body, kw_only=True):
    """This attempt failed; try again later."""

    delay_seconds: (
        Annotated[
            float,
            Meta(ge=0, description="Instead of the backoff; never more than its cap."),
        ]
        | None
    ) = None
    reason: Text | None = None
    lease_token: LeaseToken | None = None


class Abandoned(View, kw_only=True):
    """Where the task is now."""

    status: Literal["requeued", "dlq"]


class Nacked(View, kw_only=True):
    """Where the task is now, and how long it waits there."""

    status: Literal["requeued", "dlq"]
    delay_seconds: float


class NewResult(Body, kw_only=True):
    """How the work ended."""

    status: Literal["COMPLETED", "FAILED"]
    result: Annotated[
        Raw, Meta(description="Required when COMPLETED.", extra_json_schema={"type": ["object", "null"]})
    ] = msgspec.field(default_factory=Raw)  # a raw value cannot be one of several types: absent is empty
    error: Annotated[Text, Meta(description="Required when FAILED.")] | None = None
    lease_token: LeaseToken | None = None
    worker_id: Annotated[str | None, Meta(description="Ignored: the token says who the worker is.")] = None


class NewResultOf(NewResult, kw_only=True):
    """How the work on one of several tasks ended."""

    task_id: TaskId


class NewResults(Body, kw_only=True):
    """Results of several tasks, each for itself."""

    results: Annotated[list[NewResultOf], Meta(min_length=1, max_length=LIMITS.batch)]


class Result(View, kw_only=True):
    """The stored answer of an ended task: the same on every read."""

    task_id: TaskId
    status: Status
    result: Raw | None = None
    error: str | None = None
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


class ResultQuery(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    wait_seconds: Annotated[float, Meta(ge=0, le=60, description="How long to wait for the result.")] = 0


# Admin


class QueueStats(View, kw_only=True):
    """What one queue holds."""

    command: Command
    ready: int
    delayed: int
    in_progress: int
    dlq: int
    paused: bool
    oldest_ready_seconds: Annotated[
        float | None, Meta(description="How long the task that is next in line has been ready.")
    ] = None
    ready_by_priority: Annotated[list[int], Meta(description="Ready tasks of priority 0, 1, … 9.")]


class Queues(View, kw_only=True):
    """Every queue of the tenant, by name."""

    queues: list[QueueStats]


class Paused(View, kw_only=True):
    """Whether claims are answered from this queue."""

    command: Command
    paused: bool


class NewCleanup(Body, kw_only=True):
    """Which ended tasks to remove."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    before: (
        Annotated[dt.datetime, Meta(tz=True, description="Those whose retention ends before. Now, if absent.")] | None
    ) = None


class CleanedUp(View, kw_only=True):
    """What was removed."""

    deleted: int
    before: Moment
    limit: int


# Between the wire and the nouns


def new_task(body: NewTask, trace_parent: str | None = None, trace_state: str | None = None) -> nouns.NewTask:
    return nouns.NewTask(
        command=body.command,
        payload=opaque(body.payload, "payload").decode(),
        priority=body.priority,
        max_attempts=body.max_attempts,
        webhook=body.webhook,
        idempotency_key=body.idempotency_key,
        run_at_ms=None if body.run_at is None else max(1, round(body.run_at.timestamp() * 1000)),
        delay_ms=0 if body.delay_seconds is None else round(body.delay_seconds * 1000),
        trace_parent=trace_parent,
        trace_state=trace_state,
    )


def new_result(task_id: str, body: NewResult, lease_token: str | None) -> nouns.NewResult:
    is_absent = bytes(body.result) in (b"", b"null")
    result = None if is_absent else opaque(body.result, "result")
    if result is not None and not result.startswith(b"{"):
        raise errors.InvalidRequest("Expected `object` - at `$.result`")
    if body.status == "COMPLETED" and result is None:
        raise errors.InvalidRequest("Object missing required field `result`: a COMPLETED task has one")
    if body.status == "FAILED" and body.error is None:
        raise errors.InvalidRequest("Object missing required field `error`: a FAILED task has one")
    return nouns.NewResult(
        task_id=task_id,
        status=Status(body.status),
        result=result,
        error=body.error,
        lease_token=lease_token,
    )


def opaque(raw: Raw, field: str) -> bytes:
    """A JSON value as compact UTF-8 text, every number as it was written. What no JSON reader could take is refused.

    The decoder has checked the syntax by now, escapes and surrogates among it; it looks neither at the bytes of a
    string nor at the depth, which decides whether a worker's JSON library survives the payload.
    """
    try:
        text = msgspec.json.format(raw, indent=-1)
        text.decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest(f"Not valid UTF-8 - at `$.{field}`") from error
    if text == b"null":
        raise errors.InvalidRequest(f"Expected a value, got `null` - at `$.{field}`")
    if text.count(b"[") + text.count(b"{") > PAYLOAD_DEPTH and is_deeper(text, PAYLOAD_DEPTH):
        raise errors.InvalidRequest(f"Nested deeper than {PAYLOAD_DEPTH} levels - at `$.{field}`")
    return text


_not_brackets = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\[\]{}"]+').sub
_to_square = bytes.maketrans(b"{}", b"[]")


def is_deeper(text: bytes, levels: int) -> bool:
    """Whether valid JSON nests deeper than `levels`. The innermost brackets go, again and again."""
    brackets = _not_brackets(b"", text).translate(_to_square)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def moment(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, UTC)


def task(found: nouns.Task, tenant_id: str) -> Task:
    spec = found.spec
    is_answered = found.status is Status.COMPLETED or (
        found.status is Status.FAILED and found.location is not Location.DLQ_SET
    )
    return Task(
        id=found.id,
        command=spec.command,
        payload=spec.payload,
        priority=found.priority,
        status=found.status,
        attempts=found.attempts,
        max_attempts=found.max_attempts,
        webhook=spec.webhook,
        worker_id=found.worker,
        lease_until=None if found.lease_until_ms is None else moment(found.lease_until_ms),
        lease_token=found.lease_token,
        error=found.error,
        progress=None if found.progress is None else Raw(found.progress.encode()),
        result_key=f"/v1/codeq/tasks/{found.id}/result" if is_answered else None,
        tenant_id=tenant_id,
        trace_parent=spec.trace_parent,
        trace_state=spec.trace_state,
        created_at=moment(found.created_ms),
        updated_at=moment(found.updated_ms),
        visible_at=moment(found.visible_ms) if found.visible_ms > found.created_ms else None,
        last_known_location=found.location,
    )


def result(found: nouns.Result) -> Result:
    return Result(
        task_id=found.task_id,
        status=found.status,
        result=found.result,
        error=found.error,
        worker_id=found.worker,
        attempts=found.attempts,
        completed_at=moment(found.completed_ms),
    )


def progress(value: float | Progress | None) -> str | None:
    """Progress as it is stored: the compact JSON of a `Progress`."""
    if value is None:
        return None
    known = value if isinstance(value, Progress) else Progress(percent=value)
    return msgspec.json.encode({"percent": known.percent, **({"note": known.note} if known.note else {})}).decode()


def enqueued_item(item: nouns.Enqueued | errors.CodeqError, tenant_id: str) -> EnqueuedItem:
    if isinstance(item, errors.CodeqError):
        return EnqueuedItem(error=item.code, status=item.status, detail=item.detail)
    return EnqueuedItem(task=task(item.task, tenant_id), is_replayed=item.is_replayed, is_mismatch=item.is_mismatch)


def submitted_item(task_id: str, item: nouns.Result | errors.CodeqError) -> SubmittedItem:
    if isinstance(item, errors.CodeqError):
        return SubmittedItem(task_id=task_id, error=item.code, status=item.status, detail=item.detail)
    return SubmittedItem(task_id=task_id, result=result(item))


def queue_stats(found: nouns.QueueStats, now_ms: int) -> QueueStats:
    oldest = found.oldest_ready_ms
    return QueueStats(
        command=found.command,
        ready=found.ready,
        delayed=found.delayed,
        in_progress=found.in_progress,
        dlq=found.dlq,
        paused=found.is_paused,
        oldest_ready_seconds=None if oldest is None else max(0.0, (now_ms - oldest) / 1000),
        ready_by_priority=found.ready_by_priority,
    )
