"""What outlives a task in Redis: its attempts, how it ended, what could not be stored, how deep queues were.

Text is `text`, never `jsonb`: a worker may send what jsonb refuses or rewrites (`\\u0000`, `1e400`,
duplicate keys), and one such result must not stop the audit. The tenant is kept as its `tid` without a
database constraint: a row then needs no lookup, costs no lock on the tenant's row, and stays when the
tenant goes.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.contrib.postgres.indexes import HashIndex
from django.db import models

from queues.task import Outcome, Status


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

    class Meta:
        constraints = [models.UniqueConstraint(fields=["task_id", "number"], name="attempt_of_task")]
        indexes = [
            models.Index(fields=["ended_at"], name="attempt_ended"),
            models.Index(fields=["tenant", "ended_at"], name="attempt_tenant_ended"),
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
    is_dead = models.BooleanField(help_text="Out of attempts: nacked, abandoned or expired once too often.")
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

    class Meta:
        verbose_name = "audited result"
        indexes = [
            models.Index(fields=["ended_at"], name="audited_ended"),
            models.Index(fields=["tenant", "ended_at"], name="audited_tenant_ended"),
            models.Index(
                fields=["tenant", "command", "ended_at"],
                condition=models.Q(is_dead=True),
                name="audited_dead",
            ),
            HashIndex(fields=["worker"], name="audited_worker"),
        ]
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
