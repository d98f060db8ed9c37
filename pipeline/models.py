"""The marts as people read them, what of the lake is already in them, and the log of the runs.

Each mart's columns are its contract's in `pipeline.spark.schemas`; rows come and go by day and tenant, written by
the pipeline alone. The tenant has no database constraint: history outlives it.
"""

from __future__ import annotations

from typing import Any

from django.db import models


def tenant_key() -> Any:
    return models.ForeignKey(
        "tenants.Tenant",
        to_field="tid",
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
    )


class Mart(models.Model):
    """What all marts have in common: a row belongs to one day (UTC) and one tenant."""

    date = models.DateField(help_text="UTC day.")
    tenant = tenant_key()

    class Meta:
        abstract = True
        ordering = ["-date"]


class HourlyMart(Mart):
    command = models.TextField()
    hour = models.DateTimeField(help_text="Beginning of the hour.")

    class Meta(Mart.Meta):
        abstract = True

    def __str__(self) -> str:
        return f"{self.command} {self.hour:%Y-%m-%d %H:%M}"


def indexed(name: str, *more: str) -> dict[str, Any]:
    """By tenant and day, which every reader asks for and the pipeline deletes by; a row's key is unique."""
    return {
        "indexes": [models.Index(fields=["date", "tenant"], name=f"{name}_day")],
        "constraints": [models.UniqueConstraint(fields=["tenant", "date", *more], name=f"{name}_key")],
    }


class Throughput(HourlyMart):
    """Attempts by how they ended, in the hour in which they ended."""

    attempts = models.BigIntegerField()
    completed = models.BigIntegerField()
    failed = models.BigIntegerField()
    nacked = models.BigIntegerField()
    abandoned = models.BigIntegerField()
    expired = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    retries = models.BigIntegerField(help_text="Attempts after a task's first one.")
    ended = models.BigIntegerField(help_text="Attempts after which the task was over.")
    dead = models.BigIntegerField(help_text="Attempts that left the task in the dead letters.")

    class Meta(HourlyMart.Meta):
        verbose_name_plural = "throughput"
        indexes = indexed("throughput")["indexes"]
        constraints = indexed("throughput", "command", "hour")["constraints"]


class Latency(HourlyMart):
    """How long tasks waited for a worker and ran, by the hour in which the attempt ended."""

    attempts = models.BigIntegerField()
    wait_mean_ms = models.FloatField()
    wait_p50_ms = models.BigIntegerField()
    wait_p95_ms = models.BigIntegerField()
    wait_p99_ms = models.BigIntegerField()
    wait_max_ms = models.BigIntegerField()
    run_mean_ms = models.FloatField()
    run_p50_ms = models.BigIntegerField()
    run_p95_ms = models.BigIntegerField()
    run_p99_ms = models.BigIntegerField()
    run_max_ms = models.BigIntegerField()

    class Meta(HourlyMart.Meta):
        verbose_name_plural = "latency"
        indexes = indexed("latency")["indexes"]
        constraints = indexed("latency", "command", "hour")["constraints"]


class Failure(Mart):
    """Attempts without success by the name of their failure (`core.failure_fingerprint`)."""

    command = models.TextField()
    fingerprint = models.TextField()
    attempts = models.BigIntegerField()
    dead = models.BigIntegerField(help_text="Of these, how many left the task in the dead letters.")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    example = models.TextField(help_text="A task it happened to.")

    class Meta(Mart.Meta):
        db_table = "pipeline_failures"
        indexes = indexed("failures")["indexes"]
        constraints = indexed("failures", "command", "fingerprint")["constraints"]

    def __str__(self) -> str:
        return self.fingerprint


class Usage(Mart):
    """What a tenant used in a day."""

    tasks = models.BigIntegerField(help_text="Tasks that ended; a replayed one counts each time.")
    attempts = models.BigIntegerField()
    compute_ms = models.BigIntegerField(help_text="Time that workers held tasks.")
    payload_bytes = models.BigIntegerField(help_text="Of the tasks that ended.")
    result_bytes = models.BigIntegerField()
    delivered_bytes = models.BigIntegerField(help_text="Payload bytes of every delivery.")

    class Meta(Mart.Meta):
        verbose_name_plural = "usage"
        indexes = indexed("usage")["indexes"]
        constraints = indexed("usage")["constraints"]

    def __str__(self) -> str:
        return f"{self.date}"


class Capacity(HourlyMart):
    """The work that became due in an hour, and the workers it takes to keep the mean wait at a target."""

    arrivals = models.BigIntegerField(help_text="Deliveries that became due, retries included.")
    service_mean_ms = models.FloatField()
    service_cv2 = models.FloatField(help_text="Squared coefficient of variation of the run time; 1 = exponential.")
    load = models.FloatField(help_text="Erlang: workers that would be busy all the time.")
    wait_mean_ms = models.FloatField(help_text="As it was.")
    workers_1s = models.IntegerField(help_text="Workers for a mean wait of at most 1 s.")
    workers_10s = models.IntegerField(help_text="Workers for a mean wait of at most 10 s.")
    workers_60s = models.IntegerField(help_text="Workers for a mean wait of at most 60 s.")

    class Meta(HourlyMart.Meta):
        verbose_name_plural = "capacity"
        indexes = indexed("capacity")["indexes"]
        constraints = indexed("capacity", "command", "hour")["constraints"]


class LeaseAdvice(Mart):
    """How long a lease and how many attempts a command needed that day."""

    command = models.TextField()
    attempts = models.BigIntegerField()
    completed = models.BigIntegerField()
    expired = models.BigIntegerField()
    run_p50_ms = models.BigIntegerField(null=True)
    run_p99_ms = models.BigIntegerField(null=True)
    run_max_ms = models.BigIntegerField(null=True)
    duplicate_ms = models.BigIntegerField(help_text="Worked by attempts whose lease ran out, and so done again.")
    lease_advice_seconds = models.IntegerField(null=True)
    max_attempts_advice = models.IntegerField(null=True)

    class Meta(Mart.Meta):
        db_table = "pipeline_leases"
        verbose_name_plural = "lease advice"
        indexes = indexed("leases")["indexes"]
        constraints = indexed("leases", "command")["constraints"]

    def __str__(self) -> str:
        return f"{self.command} {self.date}"


class WebhookHealth(Mart):
    """How an endpoint answered in an hour."""

    endpoint = models.TextField()
    hour = models.DateTimeField(help_text="Beginning of the hour.")
    attempts = models.BigIntegerField()
    delivered = models.BigIntegerField()
    refused = models.BigIntegerField(help_text="Answered with another status than 2xx.")
    unreachable = models.BigIntegerField(help_text="Not answered at all.")
    latency_p50_ms = models.BigIntegerField(null=True)
    latency_p95_ms = models.BigIntegerField(null=True)
    latency_p99_ms = models.BigIntegerField(null=True)
    latency_max_ms = models.BigIntegerField(null=True)

    class Meta(Mart.Meta):
        db_table = "pipeline_webhooks"
        verbose_name_plural = "webhook health"
        indexes = indexed("webhooks")["indexes"]
        constraints = indexed("webhooks", "endpoint", "hour")["constraints"]

    def __str__(self) -> str:
        return f"{self.endpoint} {self.hour:%Y-%m-%d %H:%M}"


# By the name that jobs, lake, API and console share.
MARTS: dict[str, type[Mart]] = {
    "throughput": Throughput,
    "latency": Latency,
    "failures": Failure,
    "usage": Usage,
    "capacity": Capacity,
    "leases": LeaseAdvice,
    "webhooks": WebhookHealth,
}


class Published(models.Model):
    """Which state of the lake a mart's rows of one day and tenant are. Written with them, in one transaction."""

    mart = models.TextField()
    date = models.DateField()
    tenant = tenant_key()
    source = models.TextField(help_text="What the rows were computed from, as the lake's manifest says it.")

    class Meta:
        verbose_name_plural = "published"
        constraints = [models.UniqueConstraint(fields=["mart", "date", "tenant"], name="published_key")]

    def __str__(self) -> str:
        return f"{self.mart} {self.date}"


class RunLog(models.Model):
    """One job of one run: what it read and wrote, how long it took, how it ended."""

    class State(models.TextChoices):
        RUNNING = "running", "running"
        SUCCEEDED = "succeeded", "succeeded"
        FAILED = "failed", "failed"

    run = models.UUIDField(help_text="The same for all jobs of a run.")
    job = models.TextField()
    state = models.TextField(choices=State, default=State.RUNNING)
    stage = models.TextField(blank=True, help_text="What it said it was doing last.")
    master = models.TextField(help_text="Where Spark ran.")
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    seconds = models.FloatField(default=0)
    rows_in = models.BigIntegerField(default=0)
    rows_out = models.BigIntegerField(default=0)
    quarantined = models.BigIntegerField(default=0, help_text="Rows and files that broke the contract.")
    late_dropped = models.BigIntegerField(default=0, help_text="Rows of days beyond the horizon.")
    partitions = models.BigIntegerField(default=0, help_text="Days and tenants that were computed.")
    notes = models.TextField(blank=True)
    error = models.TextField(blank=True)

    class Meta:
        verbose_name = "run"
        ordering = ["-started_at"]
        indexes = [models.Index(fields=["-started_at"], name="runlog_started")]
        get_latest_by = "started_at"

    def __str__(self) -> str:
        return f"{self.job} {self.started_at:%Y-%m-%d %H:%M}"
