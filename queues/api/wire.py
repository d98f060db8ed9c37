"""The wire types: what a request may say and what an answer says. They are the contract; the schema is made of them.

Unknown fields are refused, a bool is no number, a time has a zone. Of a key that comes twice in one object the last
one counts, as in every JSON library a client is likely to use; inside a payload both are kept.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from codeq_site.conf import conf
from queues.task import Location, Status

LIMITS = conf().queues
# `$` also matches before a last newline, which must not get into a key; no client can say what these refuse.
NO_NEWLINE = r"(?!\n)$"
COMMAND_PATTERN = r"^[A-Za-z0-9_.-]{1,128}" + NO_NEWLINE
UUID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}" + NO_NEWLINE
# PostgreSQL takes no NUL in a text, so one accepted here would stop the audit later.
NO_NUL = r"^[^\x00]*$"

# Every white space by its number: Python's `\s` and that of ECMAScript, which the schema is read with, differ.
_SPACE = r"\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
ADDRESS_PATTERN = rf"^https?://(\[[0-9A-Fa-f:.]+\](:[0-9]*)?|[^\[\]/?#{_SPACE}]+)([/?#][^{_SPACE}]*)?" + NO_NEWLINE
# What `webhooks.addresses` takes, as far as a pattern can say it: visible ASCII, no user, no fragment.
CALLBACK_PATTERN = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?][!\"$-\[\]-~]*)?" + NO_NEWLINE
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
TEXT_CHARACTERS = 16_384
# Of one result.
ARTIFACTS = 100

Command = Annotated[
    str, Meta(pattern=COMMAND_PATTERN, description="The queue inside the tenant.", examples=["RENDER_VIDEO"])
]
TaskId = Annotated[
    str, Meta(pattern=UUID_PATTERN, description="UUID v7.", examples=["01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"])
]
# JSON has one kind of number: 5 and 5.0 are the same, and some libraries write the second. So what is a whole number to
# us is decoded as any number that is a multiple of 1; the schema says `integer`, which means just that.
Priority = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=0,
        le=9,
        description="Higher goes first. If absent: 0, or the lowest that the queue's policy knows.",
    ),
]
LeaseToken = Annotated[
    str,
    Meta(min_length=1, max_length=128, pattern=r"^[ -~]+$", description="The `leaseToken` the claim gave."),
]
LeaseSeconds = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=1,
        le=LIMITS.lease_limit_seconds,
        description=f"How long the lease lasts. {LIMITS.lease_seconds} if absent.",
    ),
]
WaitSeconds = Annotated[float, Meta(ge=0, le=30, description="How long to wait for a task before the answer is 204.")]
Count = Annotated[float, Meta(multiple_of=1, ge=1, le=LIMITS.claim_batch, description="The most tasks to take.")]
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
    priority: Priority | UnsetType = UNSET
    max_attempts: (
        Annotated[
            float,
            Meta(
                multiple_of=1,
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
                description="Called when the task has ended.",
                examples=["https://example.org/codeq/hook"],
                # Judged task by task (`webhooks.addresses`), so that a bad one does not refuse its batch.
                extra_json_schema={"pattern": CALLBACK_PATTERN},
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
    status: Status
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

    limit: Annotated[float, Meta(multiple_of=1, ge=1, le=10_000)] = 1000
    before: (
        Annotated[dt.datetime, Meta(tz=True, description="Those whose retention ends before. Now, if absent.")] | None
    ) = None


class CleanedUp(View, kw_only=True):
    """What was removed."""

    deleted: int
    before: Moment
    limit: int
