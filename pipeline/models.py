"""Models of the published marts, of the data they were computed from, and of the run log.

The columns of a mart are those of its contract in `pipeline.spark.schemas`. Only the pipeline writes the rows; it
replaces all rows of a day and tenant together. The tenant has no foreign key constraint, because history is kept
after a tenant is deleted.
"""

from __future__ import annotations

from typing import Any

from django.db import models


def build_tenant_key() -> Any:
    return models.ForeignKey(
        "tenants.Tenant",
        to_field="tid",
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
    )


class Mart(models.Model):
    """Base class of the marts: each row belongs to one day (UTC) and one tenant."""

    date = models.DateField(help_text="UTC day.")
    tenant = build_tenant_key()

    class Meta:
        abstract = True
        ordering = ["-date"]


class HourlyMart(Mart):
    command = models.TextField()
    hour = models.DateTimeField(help_text="Start of the hour.")

    class Meta(Mart.Meta):
        abstract = True

    def __str__(self) -> str:
        return f"{self.command} {self.hour:%Y-%m-%d %H:%M}"


def build_indexes(name: str, *columns: str) -> dict[str, Any]:
    """Return the index and the unique key of a mart.

    The pipeline deletes by the index. Reads use the key, which begins with tenant and day.
    """
    return {
        "indexes": [models.Index(fields=["date", "tenant"], name=f"{name}_day")],
        "constraints": [models.UniqueConstraint(fields=["tenant", "date", *columns], name=f"{name}_key")],
    }


class Throughput(HourlyMart):
    """Attempts by outcome, per command and hour in which they ended."""

    attempts = models.BigIntegerField()
    completed = models.BigIntegerField()
    failed = models.BigIntegerField()
    nacked = models.BigIntegerField()
    abandoned = models.BigIntegerField()
    expired = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    retries = models.BigIntegerField(help_text="Attempts after the first attempt of a task.")
    ended = models.BigIntegerField(help_text="Attempts that finished their task.")
    dead = models.BigIntegerField(help_text="Attempts that made their task a dead letter.")

    class Meta(HourlyMart.Meta):
        verbose_name_plural = "throughput"
        indexes = build_indexes("throughput")["indexes"]
        constraints = build_indexes("throughput", "command", "hour")["constraints"]


class Latency(HourlyMart):
    """Wait times and run times, per command and hour in which the attempt ended."""

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
        indexes = build_indexes("latency")["indexes"]
        constraints = build_indexes("latency", "command", "hour")["constraints"]


class Failure(Mart):
    """Unsuccessful attempts by fingerprint: the failure message without its varying parts."""

    command = models.TextField()
    fingerprint = models.TextField()
    attempts = models.BigIntegerField()
    dead = models.BigIntegerField(help_text="Attempts that made their task a dead letter.")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    example = models.TextField(help_text="ID of a task with this failure.")

    class Meta(Mart.Meta):
        db_table = "pipeline_failures"
        indexes = build_indexes("failures")["indexes"]
        constraints = build_indexes("failures", "command", "fingerprint")["constraints"]

    def __str__(self) -> str:
        return self.fingerprint


class Usage(Mart):
    """A tenant's usage on a day."""

    tasks = models.BigIntegerField(help_text="Tasks that ended. A replayed task counts each time.")
    attempts = models.BigIntegerField()
    compute_ms = models.BigIntegerField(help_text="Total time that workers held tasks.")
    payload_bytes = models.BigIntegerField(help_text="Payload bytes of the tasks that ended.")
    result_bytes = models.BigIntegerField()
    delivered_bytes = models.BigIntegerField(help_text="Payload bytes sent to workers, counted for every claim.")

    class Meta(Mart.Meta):
        verbose_name_plural = "usage"
        indexes = build_indexes("usage")["indexes"]
        constraints = build_indexes("usage")["constraints"]

    def __str__(self) -> str:
        return f"{self.date}"


class Capacity(HourlyMart):
    """The load of an hour, and the workers needed to keep the mean wait at a target."""

    arrivals = models.BigIntegerField(help_text="Attempts that became due, including retries.")
    service_mean_ms = models.FloatField()
    service_cv2 = models.FloatField(help_text="Squared coefficient of variation of the run time. 1 = exponential.")
    load = models.FloatField(help_text="Load in Erlang: workers that would be busy all the time.")
    wait_mean_ms = models.FloatField(help_text="Measured mean wait.")
    workers_1s = models.IntegerField(help_text="Workers needed for a mean wait of at most 1 s.")
    workers_10s = models.IntegerField(help_text="Workers needed for a mean wait of at most 10 s.")
    workers_60s = models.IntegerField(help_text="Workers needed for a mean wait of at most 60 s.")

    class Meta(HourlyMart.Meta):
        verbose_name_plural = "capacity"
        indexes = build_indexes("capacity")["indexes"]
        constraints = build_indexes("capacity", "command", "hour")["constraints"]


class LeaseAdvice(Mart):
    """The lease duration and the number of attempts that a command needed on a day."""

    command = models.TextField()
    attempts = models.BigIntegerField()
    completed = models.BigIntegerField()
    expired = models.BigIntegerField()
    run_p50_ms = models.BigIntegerField(null=True)
    run_p99_ms = models.BigIntegerField(null=True)
    run_max_ms = models.BigIntegerField(null=True)
    duplicate_ms = models.BigIntegerField(
        help_text="Run time of attempts whose lease expired. That work was done again."
    )
    lease_advice_seconds = models.IntegerField(null=True)
    max_attempts_advice = models.IntegerField(null=True)

    class Meta(Mart.Meta):
        db_table = "pipeline_leases"
        verbose_name_plural = "lease advice"
        indexes = build_indexes("leases")["indexes"]
        constraints = build_indexes("leases", "command")["constraints"]

    def __str__(self) -> str:
        return f"{self.command} {self.date}"


class WebhookHealth(Mart):
    """Delivery attempts to an endpoint in an hour, by result."""

    endpoint = models.TextField()
    hour = models.DateTimeField(help_text="Start of the hour.")
    attempts = models.BigIntegerField()
    delivered = models.BigIntegerField()
    refused = models.BigIntegerField("rejected", help_text="Attempts answered with a status other than 2xx.")
    unreachable = models.BigIntegerField(help_text="Attempts without a response.")
    latency_p50_ms = models.BigIntegerField(null=True)
    latency_p95_ms = models.BigIntegerField(null=True)
    latency_p99_ms = models.BigIntegerField(null=True)
    latency_max_ms = models.BigIntegerField(null=True)

    class Meta(Mart.Meta):
        db_table = "pipeline_webhooks"
        verbose_name_plural = "webhook health"
        indexes = build_indexes("webhooks")["indexes"]
        constraints = build_indexes("webhooks", "endpoint", "hour")["constraints"]

    def __str__(self) -> str:
        return f"{self.endpoint} {self.hour:%Y-%m-%d %H:%M}"


# The names are those of the Spark jobs, the lake's tables, the API and the console.
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
    """The identifier of the data from which a mart's rows of one day and tenant were computed.

    It is written in the same transaction as the rows.
    """

    mart = models.TextField()
    date = models.DateField()
    tenant = build_tenant_key()
    source = models.TextField(
        help_text="Identifier of the data that the rows were computed from, from the lake's manifest."
    )

    class Meta:
        verbose_name_plural = "published"
        constraints = [models.UniqueConstraint(fields=["mart", "date", "tenant"], name="published_key")]

    def __str__(self) -> str:
        return f"{self.mart} {self.date}"


class RunLog(models.Model):
    """A Spark job of a run: rows read and written, duration, and result."""

    class JobState(models.TextChoices):
        RUNNING = "running", "running"
        SUCCEEDED = "succeeded", "succeeded"
        FAILED = "failed", "failed"

    run = models.UUIDField(help_text="ID shared by all Spark jobs of a run.")
    job = models.TextField()
    state = models.TextField(choices=JobState, default=JobState.RUNNING)
    stage = models.TextField(blank=True, help_text="Last progress message.")
    master = models.TextField(help_text="Master URL of Spark.")
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    seconds = models.FloatField(default=0)
    rows_in = models.BigIntegerField(default=0)
    rows_out = models.BigIntegerField(default=0)
    quarantined = models.BigIntegerField(default=0, help_text="Rows rejected because they break the contract.")
    late_dropped = models.BigIntegerField(default=0, help_text="Rows dropped because their day is beyond the horizon.")
    partitions = models.BigIntegerField(default=0, help_text="Partitions computed: combinations of day and tenant.")
    notes = models.TextField(blank=True)
    error = models.TextField(blank=True)

    class Meta:
        verbose_name = "run"
        ordering = ["-started_at"]
        indexes = [models.Index(fields=["-started_at"], name="runlog_started")]
        get_latest_by = "started_at"

    def __str__(self) -> str:
        return f"{self.job} {self.started_at:%Y-%m-%d %H:%M}"
