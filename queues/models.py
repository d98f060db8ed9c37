"""What outlives a task in Redis: its attempts, how it ended, what could not be stored, how deep queues were. And what
is asked of queues: policies, bulk jobs, entries of ranked queues.

Text is `text`, never `jsonb`: a worker may send what jsonb refuses or rewrites (`\\u0000`, `1e400`,
duplicate keys), and one such result must not stop the audit. The tenant is kept as its `tid` without a
database constraint: a row then needs no lookup, costs no lock on the tenant's row, and stays when the
tenant goes.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import get_args

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.contrib.postgres.search import SearchVectorField
from django.db import models
from django.db.models import F, Func

from core.admin.date_hierarchy import IndexedDateHierarchyQuerySet
from core.conf import BackoffPolicy
from queues.domain import Outcome, Status


def tenant_key() -> models.ForeignKey[models.Model | None, models.Model | None]:
    return models.ForeignKey(
        "tenants.Tenant",
        null=True,  # never is; but without it a join would hide the rows of a tenant that has gone
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
    )


class Attempt(models.Model):
    """One delivery of a task to a worker, and how it ended. The fact the pipeline counts."""

    task_id = models.UUIDField()
    number = models.PositiveIntegerField(help_text="Counted over the whole life of the task, replays included.")
    tenant = tenant_key()
    command = models.TextField()
    priority = models.SmallIntegerField()
    created_at = models.DateTimeField(help_text="When the task was enqueued.")
    visible_at = models.DateTimeField(help_text="From when this delivery could have been claimed.")
    claimed_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField()
    outcome = models.TextField(choices=[(value, value) for value in Outcome])
    status = models.TextField(choices=[(value, value) for value in Status], help_text="The task's, after it.")
    worker = models.TextField(blank=True)
    error = models.TextField(blank=True)
    payload_bytes = models.BigIntegerField()
    result_bytes = models.BigIntegerField()

    objects = IndexedDateHierarchyQuerySet.as_manager()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["task_id", "number"], name="attempt_of_task")]
        indexes = [
            models.Index(fields=["ended_at"], name="attempt_ended"),
            models.Index(fields=["tenant", "ended_at"], name="attempt_tenant_ended"),
            models.Index(fields=["worker", "ended_at"], name="attempt_worker"),
        ]
        get_latest_by = "ended_at"

    def __str__(self) -> str:
        return f"{self.task_id} #{self.number}"


class AuditedResult(models.Model):
    """How a task ended, kept after Redis let it go. A replayed dead letter has its last ending here."""

    task_id = models.UUIDField(primary_key=True)
    tenant = tenant_key()
    command = models.TextField()
    priority = models.SmallIntegerField()
    payload = models.TextField(blank=True, help_text="JSON text as it came; empty if the task was purged first.")
    status = models.TextField(choices=[(value, value) for value in Status if value.is_terminal])
    outcome = models.TextField(choices=[(value, value) for value in Outcome])
    is_dead = models.BooleanField(help_text="A dead letter: out of attempts, neither replayed nor deleted since.")
    fingerprint = models.BigIntegerField(
        null=True, help_text="Of a dead letter: which failure it is, as a number (queues.deadletters.failure_groups)."
    )
    error = models.TextField(blank=True)
    result = models.TextField(blank=True)
    artifacts = models.TextField(blank=True)
    attempts = models.PositiveIntegerField(help_text="Ended attempts without success.")
    deliveries = models.PositiveIntegerField(help_text="Number of the attempt that ended it; 0 = none was made.")
    max_attempts = models.PositiveIntegerField()
    worker = models.TextField(blank=True)
    webhook = models.TextField(blank=True)
    trace_parent = models.TextField(blank=True)
    trace_state = models.TextField(blank=True)
    created_at = models.DateTimeField()
    claimed_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField()
    position = models.BigIntegerField(
        help_text="Where in the events stream it was said. Decides which ending is the last one."
    )

    objects = IndexedDateHierarchyQuerySet.as_manager()

    class Meta:
        verbose_name = "audited result"
        # Few rows are dead or failed, so their indexes cost the drain little. What each list and search reads is said
        # in queues/search/pagination.py.
        indexes = [
            models.Index(fields=["ended_at"], name="audited_ended"),
            models.Index(fields=["tenant", "ended_at"], name="audited_tenant_ended"),
            models.Index(fields=["tenant", "command", "ended_at"], name="audited_command_ended"),
            models.Index(
                fields=["tenant", "ended_at"],
                condition=~models.Q(status=Status.COMPLETED),
                name="audited_not_completed",
            ),
            models.Index(fields=["ended_at"], condition=models.Q(is_dead=True), name="audited_dead_all"),
            models.Index(fields=["tenant", "ended_at"], condition=models.Q(is_dead=True), name="audited_dead_tenant"),
            models.Index(
                fields=["tenant", "command", "ended_at"],
                condition=models.Q(is_dead=True),
                name="audited_dead",
            ),
            models.Index(
                fields=["tenant", "command", "fingerprint", "ended_at"],
                condition=models.Q(is_dead=True),
                name="audited_dead_failure",
            ),
            # No hash index: an entry more of a worker that has many walks past all of them (measured: at 100,000 rows
            # of each worker 20 µs a row instead of 2, and growing with every row).
            models.Index(fields=["worker", "ended_at"], name="audited_worker"),
            GinIndex(
                Func(
                    F("tenant"), F("worker"), F("error"), F("payload"),
                    function="queues_words", output_field=SearchVectorField(),
                ),
                name="audited_words",
            ),
        ]  # fmt: skip
        get_latest_by = "ended_at"

    def __str__(self) -> str:
        return str(self.task_id)


class Quarantine(models.Model):
    """An entry of the events stream that could not be stored. It stopped nobody behind it, and can be tried
    again.
    """

    partition = models.PositiveIntegerField()
    stream_id = models.TextField()
    reason = models.TextField()
    raw = models.BinaryField(help_text="msgpack of the entry's fields, the task's spec and its result, as read.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "quarantine"
        constraints = [models.UniqueConstraint(fields=["partition", "stream_id"], name="quarantined_once")]

    def __str__(self) -> str:
        return f"{self.partition}/{self.stream_id}"


class BeatJob(models.Model):
    """The last run of one job of the beat schedule, for operators to look at. Nothing reads it to decide."""

    name = models.TextField(primary_key=True)
    task = models.TextField()
    every_seconds = models.FloatField()
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    outcome = models.TextField(help_text="What the run said it did.", blank=True)
    runs = models.BigIntegerField(default=0)
    failures = models.BigIntegerField(default=0)
    failed_at = models.DateTimeField(null=True)
    error = models.TextField(blank=True)

    class Meta:
        verbose_name = "beat job"

    def __str__(self) -> str:
        return self.name

    @property
    def next_at(self) -> datetime:
        return self.started_at + timedelta(seconds=self.every_seconds)

    @property
    def duration_ms(self) -> int:
        return round((self.ended_at - self.started_at).total_seconds() * 1000)


class QueueSample(models.Model):
    """How deep one queue was at one minute, and what came and went since the sample before.

    An unchanged queue is sampled every half hour only, an empty one not at all: no row within an hour says empty.
    """

    tenant = tenant_key()
    command = models.TextField()
    at = models.DateTimeField()
    ready = models.BigIntegerField()
    delayed = models.BigIntegerField()
    in_progress = models.BigIntegerField()
    dead = models.BigIntegerField()
    oldest_ready_seconds = models.FloatField(null=True)
    arrived = models.BigIntegerField(
        help_text="Enqueued or replayed: what the depth grew by, and what left. Below 0 makes up for the row before."
    )
    completed = models.BigIntegerField()
    failed = models.BigIntegerField(help_text="Attempts that a worker ended with an error.")
    died = models.BigIntegerField(help_text="Out of attempts.")
    returned = models.BigIntegerField(help_text="Attempts that ended without success, the task going on.")
    cancelled = models.BigIntegerField()
    waits = ArrayField(
        models.IntegerField(),
        default=list,
        help_text="How long attempts waited to be claimed: see queues/stats/histogram.py.",
    )
    runs = ArrayField(models.IntegerField(), default=list, help_text="How long they ran.")

    class Meta:
        verbose_name = "depth sample"
        # One order for all queues of a tenant in the last hour, one for a week of one queue.
        constraints = [models.UniqueConstraint(fields=["tenant", "at", "command"], name="one_sample_a_minute")]
        indexes = [
            models.Index(fields=["tenant", "command", "at"], name="sample_of_queue"),
            models.Index(fields=["at"], name="sample_at"),
        ]
        get_latest_by = "at"

    def __str__(self) -> str:
        return f"{self.tenant_id}:{self.command} at {self.at:%H:%M}"


class BulkJob(models.Model):
    """Something done to many dead letters, a piece at a time: see queues/deadletters/bulk_runner.py."""

    class Kind(models.TextChoices):
        REPLAY = "replay", "replay"
        DELETE = "delete", "delete"
        RECALL = "recall", "take back a replay"

    class State(models.TextChoices):
        RUNNING = "running", "running"
        WATCHING = "watching", "watching the canaries"
        DONE = "done", "done"
        STOPPED = "stopped", "stopped: too many canaries died"
        CANCELLING = "cancelling", "cancelling"
        CANCELLED = "cancelled", "cancelled"
        FAILED = "failed", "failed"

    id = models.UUIDField(primary_key=True, editable=False)
    tenant = tenant_key()
    kind = models.TextField(choices=Kind)
    state = models.TextField(choices=State, default=State.RUNNING)
    filter = models.TextField(blank=True, help_text="Which dead letters, as JSON; empty: those named one by one.")
    actor = models.TextField(help_text="Who asked for it.")
    reason = models.TextField(blank=True)
    rate_per_second = models.PositiveIntegerField(
        null=True, help_text="No faster than this; empty: as fast as it goes."
    )
    canary = models.PositiveIntegerField(default=0, help_text="So many first, and then a look at what became of them.")
    canary_percent = models.PositiveIntegerField(
        default=0, help_text="The most of them that may die again, in per cent."
    )
    canary_seconds = models.PositiveIntegerField(default=0, help_text="How long they are watched.")
    canaries_died = models.PositiveIntegerField(null=True)
    watched_until = models.DateTimeField(null=True)
    total = models.BigIntegerField(null=True, help_text="How many there are to do; empty until they are counted.")
    done = models.BigIntegerField(default=0)
    skipped = models.BigIntegerField(default=0, help_text="Not a dead letter any more when its turn came.")
    failed = models.BigIntegerField(default=0)
    error = models.TextField(blank=True, help_text="Why the job as a whole could not go on.")
    recalls = models.ForeignKey(
        "self", null=True, on_delete=models.CASCADE, related_name="recalled_by", help_text="The replay to take back."
    )
    # Who died later than the job was asked for is not its business: a task it has replayed, for one.
    before = models.DateTimeField()
    # Where it is: what has been chosen last, and is sent (again, after a crash) before anything else is chosen.
    sending = ArrayField(models.UUIDField(), default=list)
    piece = models.BigIntegerField(default=0)
    after_ended_at = models.DateTimeField(null=True)
    after_task_id = models.UUIDField(null=True)
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "bulk job"
        indexes = [
            models.Index(fields=["tenant", "created_at"], name="bulk_tenant_created"),
            models.Index(fields=["created_at"], condition=models.Q(ended_at=None), name="bulk_unfinished"),
        ]
        get_latest_by = "created_at"

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"

    @property
    def handled(self) -> int:
        return self.done + self.skipped + self.failed

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None


class BulkItem(models.Model):
    """A task that a job was asked for by its id, a canary, or one that could not be done."""

    job = models.ForeignKey(BulkJob, on_delete=models.CASCADE, related_name="items")
    task_id = models.UUIDField()
    outcome = models.TextField(blank=True, help_text="done, skipped or failed; empty: not yet.")
    error = models.TextField(blank=True, help_text="The code of what was wrong.")
    is_canary = models.BooleanField(default=False)

    class Meta:
        verbose_name = "item of a bulk job"
        constraints = [models.UniqueConstraint(fields=["job", "task_id"], name="once_in_a_job")]
        indexes = [models.Index(fields=["job", "id"], condition=models.Q(outcome=""), name="bulk_item_waiting")]

    def __str__(self) -> str:
        return f"{self.task_id} {self.outcome or 'waits'}"


class QueuePolicy(models.Model):
    """What holds in one queue, where it is not what holds everywhere: see queues/policies.py."""

    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, related_name="+")
    command = models.TextField()
    max_attempts = models.PositiveIntegerField(null=True, blank=True, help_text="Deliveries of a task that names none.")
    priority_tiers = ArrayField(
        models.PositiveSmallIntegerField(), null=True, blank=True, help_text="The priorities a task may have."
    )
    retention_seconds = models.PositiveIntegerField(null=True, blank=True, help_text="How long an ended task stays.")
    max_consumers = models.PositiveIntegerField(
        null=True, blank=True, help_text="Tasks that may be in progress at once."
    )
    dead_letter_topic = models.TextField(blank=True, help_text="The queue that takes tasks which are out of attempts.")
    backoff = models.TextField(blank=True, choices=[(name, name) for name in get_args(BackoffPolicy)])
    backoff_base_seconds = models.FloatField(null=True, blank=True)
    backoff_cap_seconds = models.FloatField(null=True, blank=True)
    version = models.PositiveIntegerField(default=1)
    changed_by = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        verbose_name = "queue policy"
        verbose_name_plural = "queue policies"
        constraints = [models.UniqueConstraint(fields=["tenant", "command"], name="one_policy_of_a_queue")]

    def __str__(self) -> str:
        return f"{self.tenant_id}:{self.command} v{self.version}"
