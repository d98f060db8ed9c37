"""Models of the audit, queue samples, policies, bulk jobs and periodic tasks.

JSON is stored as `text`, never as `jsonb`: a worker may send JSON that jsonb refuses or rewrites (`\\u0000`, `1e400`,
duplicate keys), and one such result must not stop the audit. The foreign key of a tenant has no database constraint:
inserting a row reads and locks no tenant, and the row stays when the tenant is deleted.
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
from queues.domain import Outcome, TaskStatus


def tenant_key() -> models.ForeignKey[models.Model | None, models.Model | None]:
    """Return a foreign key to a tenant, without a constraint in the database."""
    return models.ForeignKey(
        "tenants.Tenant",
        null=True,  # never null, but makes joins outer joins, which keep the rows of deleted tenants
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
    )


class Attempt(models.Model):
    """One attempt of a task and its outcome. The pipeline counts these rows."""

    task_id = models.UUIDField()
    number = models.PositiveIntegerField(help_text="Counted over the whole life of the task, including replays.")
    tenant = tenant_key()
    command = models.TextField()
    priority = models.SmallIntegerField()
    created_at = models.DateTimeField(help_text="When the task was enqueued.")
    visible_at = models.DateTimeField(help_text="When the attempt could first have been claimed.")
    claimed_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField()
    outcome = models.TextField(choices=[(outcome.value, outcome.value) for outcome in Outcome])
    status = models.TextField(
        choices=[(status.value, status.value) for status in TaskStatus],
        help_text="The status of the task after the attempt.",
    )
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
    """The end of a task, kept after Redis has deleted the task.

    If a dead letter is replayed, its next end replaces this one.
    """

    task_id = models.UUIDField(primary_key=True)
    tenant = tenant_key()
    command = models.TextField()
    priority = models.SmallIntegerField()
    payload = models.TextField(blank=True, help_text="JSON text as submitted; empty if the task was deleted first.")
    status = models.TextField(choices=[(status.value, status.value) for status in TaskStatus if status.is_terminal])
    outcome = models.TextField(choices=[(outcome.value, outcome.value) for outcome in Outcome])
    is_dead = models.BooleanField(help_text="Out of attempts, and neither replayed nor deleted since.")
    fingerprint = models.BigIntegerField(
        null=True, help_text="The failure id of a dead letter (queues/failure_ids.py)."
    )
    error = models.TextField(blank=True)
    result = models.TextField(blank=True)
    artifacts = models.TextField(blank=True)
    attempts = models.PositiveIntegerField(help_text="Failed attempts since the task was enqueued or last replayed.")
    deliveries = models.PositiveIntegerField(
        help_text="Number of the attempt that ended it; 0 if there was no attempt."
    )
    max_attempts = models.PositiveIntegerField()
    worker = models.TextField(blank=True)
    webhook = models.TextField(blank=True)
    trace_parent = models.TextField(blank=True)
    trace_state = models.TextField(blank=True)
    created_at = models.DateTimeField()
    claimed_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField()
    position = models.BigIntegerField(
        help_text="Position of the entry in the events stream. The highest position is the last end."
    )

    objects = IndexedDateHierarchyQuerySet.as_manager()

    class Meta:
        verbose_name = "audited result"
        # Few rows are dead or failed, so their indexes cost the drain little. queues/search/pagination.py documents
        # the index that each list and search reads.
        indexes = [
            models.Index(fields=["ended_at"], name="audited_ended"),
            models.Index(fields=["tenant", "ended_at"], name="audited_tenant_ended"),
            models.Index(fields=["tenant", "command", "ended_at"], name="audited_command_ended"),
            models.Index(
                fields=["tenant", "ended_at"],
                condition=~models.Q(status=TaskStatus.COMPLETED),
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
            # Not a hash index: an insert into it walks past all entries of the same worker (measured with 100,000 rows
            # per worker: 20 µs per row instead of 2, growing with every row).
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
    """An entry of the events stream that could not be stored.

    It does not stop later entries. An operator can retry storing it.
    """

    partition = models.PositiveIntegerField()
    stream_id = models.TextField()
    reason = models.TextField()
    raw = models.BinaryField(help_text="The fields, the task's spec and its result, as msgpack.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "quarantine"
        constraints = [models.UniqueConstraint(fields=["partition", "stream_id"], name="quarantined_once")]

    def __str__(self) -> str:
        return f"{self.partition}/{self.stream_id}"


class PeriodicTaskRun(models.Model):
    """The last run of one periodic task.

    The admin, the health checks and the metrics show it. Nothing is scheduled by it.
    """

    name = models.TextField(primary_key=True)
    task = models.TextField()
    every_seconds = models.FloatField()
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    outcome = models.TextField(help_text="Summary of the run.", blank=True)
    runs = models.BigIntegerField(default=0)
    failures = models.BigIntegerField(default=0)
    failed_at = models.DateTimeField(null=True)
    error = models.TextField(blank=True)

    class Meta:
        db_table = "queues_beatjob"
        verbose_name = "periodic task"

    def __str__(self) -> str:
        return self.name

    @property
    def next_at(self) -> datetime:
        """The time at which the next run is due: one period after the start of this one."""
        return self.started_at + timedelta(seconds=self.every_seconds)

    @property
    def duration_ms(self) -> int:
        return round((self.ended_at - self.started_at).total_seconds() * 1000)


class QueueSample(models.Model):
    """The depth of one queue at one minute, and the changes since the sample before.

    An unchanged queue is sampled every half hour, and an empty queue is not sampled: no row for an hour means empty.
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
        help_text="Tasks enqueued or replayed: the growth plus the tasks that left. A negative number corrects the "
        "previous row."
    )
    completed = models.BigIntegerField()
    failed = models.BigIntegerField(help_text="Tasks that a worker ended with an error.")
    died = models.BigIntegerField(help_text="Tasks that became dead letters.")
    returned = models.BigIntegerField(help_text="Failed attempts after which the task is retried.")
    cancelled = models.BigIntegerField()
    waits = ArrayField(
        models.IntegerField(),
        default=list,
        help_text="Histogram of the time before a claim (queues/stats/histogram.py).",
    )
    runs = ArrayField(models.IntegerField(), default=list, help_text="Histogram of the time from claim to end.")

    class Meta:
        verbose_name = "depth sample"
        # The constraint's index serves all queues of a tenant in the last hour, `sample_of_queue` a week of one queue.
        constraints = [models.UniqueConstraint(fields=["tenant", "at", "command"], name="one_sample_a_minute")]
        indexes = [
            models.Index(fields=["tenant", "command", "at"], name="sample_of_queue"),
            models.Index(fields=["at"], name="sample_at"),
        ]
        get_latest_by = "at"

    def __str__(self) -> str:
        return f"{self.tenant_id}:{self.command} at {self.at:%H:%M}"


class BulkJob(models.Model):
    """An operation on many dead letters, done in steps by `queues.deadletters.bulk_runner`."""

    class Kind(models.TextChoices):
        REPLAY = "replay", "replay"
        DELETE = "delete", "delete"
        UNDO = "recall", "undo a replay"  # stored, and returned by the API, as `recall`

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
    filter = models.TextField(
        blank=True, help_text="The filter that selects dead letters, as JSON; empty if the items name them."
    )
    actor = models.TextField(help_text="The person or token that started the job.")
    reason = models.TextField(blank=True)
    rate_per_second = models.PositiveIntegerField(null=True, help_text="Maximum tasks per second; empty for no limit.")
    canary = models.PositiveIntegerField(default=0, help_text="Tasks to replay first, to see whether they die again.")
    canary_percent = models.PositiveIntegerField(
        default=0, help_text="Percentage of canaries that may die again; the job stops above it."
    )
    canary_seconds = models.PositiveIntegerField(default=0, help_text="Seconds for which the canaries are watched.")
    canaries_died = models.PositiveIntegerField(null=True)
    watched_until = models.DateTimeField(null=True)
    total = models.BigIntegerField(null=True, help_text="Tasks to handle; empty until they are counted.")
    done = models.BigIntegerField(default=0)
    skipped = models.BigIntegerField(default=0, help_text="Tasks that were no longer dead letters.")
    failed = models.BigIntegerField(default=0)
    error = models.TextField(blank=True, help_text="The error that stopped the whole job.")
    # The column has the stored name of this kind of job, `recall`.
    recalls = models.ForeignKey(
        "self", null=True, on_delete=models.CASCADE, related_name="undo_jobs", help_text="The replay to undo."
    )
    # A task that dies after the start does not belong to the job: it may be one that the job has replayed.
    before = models.DateTimeField()
    # The batch that was selected last. It is sent before the next one is selected, and sent again after a crash.
    # `batch_number` is its number. The next batch starts after the position `after_ended_at`, `after_task_id`.
    sending = ArrayField(models.UUIDField(), default=list)
    batch_number = models.BigIntegerField(default=0, db_column="piece")
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
    """A task of a bulk job: selected by its id, a canary, skipped, or failed."""

    job = models.ForeignKey(BulkJob, on_delete=models.CASCADE, related_name="items")
    task_id = models.UUIDField()
    outcome = models.TextField(blank=True, help_text="done, skipped or failed; empty while it waits.")
    error = models.TextField(blank=True, help_text="The error code.")
    is_canary = models.BooleanField(default=False)

    class Meta:
        verbose_name = "item of a bulk job"
        constraints = [models.UniqueConstraint(fields=["job", "task_id"], name="once_in_a_job")]
        indexes = [models.Index(fields=["job", "id"], condition=models.Q(outcome=""), name="bulk_item_waiting")]

    def __str__(self) -> str:
        return f"{self.task_id} {self.outcome or 'waits'}"


class QueuePolicy(models.Model):
    """The policy of one queue, which overrides the defaults: see queues/policies.py."""

    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, related_name="+")
    command = models.TextField()
    max_attempts = models.PositiveIntegerField(
        null=True, blank=True, help_text="Attempts of a task that sets no number."
    )
    priority_tiers = ArrayField(
        models.PositiveSmallIntegerField(), null=True, blank=True, help_text="The priorities a task may have."
    )
    retention_seconds = models.PositiveIntegerField(
        null=True, blank=True, help_text="Time for which an ended task is kept."
    )
    max_consumers = models.PositiveIntegerField(
        null=True, blank=True, help_text="Tasks that may be in progress at once."
    )
    dead_letter_topic = models.TextField(
        blank=True, help_text="The queue that gets the tasks that are out of attempts."
    )
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
