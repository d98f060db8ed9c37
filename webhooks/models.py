"""Who is told, and what came of it: endpoints, deliveries and their attempts; workers' subscriptions."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import MD5

from core.admin.date_hierarchy import DatedQuerySet


class Endpoint(models.Model):
    """A receiver of callbacks that something is known about: registered with a secret of its own, or in trouble.

    Most webhooks need no row here: the URL comes with the task, the secret is the tenant's.
    """

    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, related_name="+")
    address = models.TextField(help_text="The URL without its query.")
    description = models.TextField(blank=True)
    sealed = models.TextField(blank=True, editable=False)
    former_sealed = models.TextField(blank=True, editable=False)
    former_until = models.DateTimeField(null=True, editable=False)
    is_enabled = models.BooleanField(default=True)
    disabled_at = models.DateTimeField(null=True, editable=False)
    disabled_because = models.TextField(blank=True, editable=False)
    failing_since = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "address"], name="one_endpoint_per_tenant_and_address")
        ]
        indexes: ClassVar = [
            models.Index(fields=["failing_since"], condition=Q(failing_since__isnull=False), name="endpoint_failing")
        ]

    def __str__(self) -> str:
        return self.address


class Circuit(models.Model):
    """A host that failed for one tenant. After enough failures in a row it is only probed until it answers.

    For one tenant: another's misuse of a shared host must not delay this one's deliveries.
    """

    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, db_index=False, related_name="+")
    host = models.TextField()
    failures = models.PositiveIntegerField(help_text="In a row.")
    paused_until = models.DateTimeField(null=True)
    updated_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "host"], name="one_circuit_per_tenant_and_host")
        ]

    def __str__(self) -> str:
        return self.host


class Delivery(models.Model):
    """The duty to tell one endpoint of one ending of a task. Its id is the same on every attempt."""

    class Status(models.TextChoices):
        PENDING = "pending", "pending"
        DELIVERED = "delivered", "delivered"
        GIVEN_UP = "given up", "given up"
        HELD = "held", "held: the endpoint is disabled"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    # No constraint, as in the audit: what was sent stays on record when the tenant goes.
    tenant = models.ForeignKey(
        "tenants.Tenant", null=True, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+"
    )
    task_id = models.UUIDField()
    command = models.TextField()
    url = models.TextField()
    address = models.TextField(help_text="The URL without its query: the endpoint.")
    host = models.TextField(help_text="Host and port: what is slow or down together.")
    body = models.TextField()
    trace_parent = models.TextField(blank=True)
    trace_state = models.TextField(blank=True)
    status = models.TextField(choices=Status)
    tries = models.PositiveIntegerField(default=0, help_text="Since it was opened or replayed.")
    attempts = models.PositiveIntegerField(default=0, help_text="In all.")
    due_at = models.DateTimeField(help_text="Next try; while one is under way, when its worker is taken for dead.")
    reservation = models.UUIDField(null=True, editable=False)
    last_status = models.PositiveIntegerField(null=True)
    last_error = models.TextField(blank=True)
    created_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    objects = DatedQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "deliveries"
        indexes: ClassVar = [
            # The duties of one host for one tenant, by time; also what walks from one host to the next.
            models.Index(fields=["tenant", "host", "due_at"], condition=Q(status="pending"), name="delivery_due"),
            models.Index(fields=["tenant", "host"], condition=Q(reservation__isnull=False), name="delivery_reserved"),
            models.Index(fields=["tenant", "address", "created_at"], name="delivery_of_endpoint"),
            models.Index(fields=["task_id"], name="delivery_of_task"),
            models.Index(fields=["created_at"], name="delivery_created"),
            models.Index(fields=["ended_at"], condition=Q(ended_at__isnull=False), name="delivery_ended"),
        ]

    def __str__(self) -> str:
        return str(self.pk)


class DeliveryAttempt(models.Model):
    """One POST and what came of it."""

    delivery = models.ForeignKey(Delivery, on_delete=models.DO_NOTHING, db_constraint=False, related_name="attempt_set")
    number = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    duration_ms = models.PositiveIntegerField()
    status_code = models.PositiveIntegerField(null=True)
    error = models.TextField(blank=True)
    answer = models.TextField(blank=True, help_text="The first 2 KiB.")

    class Meta:
        verbose_name = "attempt"

    def __str__(self) -> str:
        return f"{self.delivery_id} #{self.number}"


class Subscription(models.Model):
    """A worker that wants to be told when one of its queues has work again. Advisory: one try, nothing kept."""

    class Mode(models.TextChoices):
        FANOUT = "fanout", "fanout: everybody"
        GROUP = "group", "group: one of each group, in turn"
        HASH = "hash", "hash: always the same one for a queue"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, db_index=False, related_name="+")
    worker = models.TextField()
    callback_url = models.TextField()
    event_types = ArrayField(models.TextField())
    mode = models.TextField(choices=Mode, default=Mode.FANOUT)
    group = models.TextField(blank=True)
    ttl_seconds = models.PositiveIntegerField()
    min_interval_seconds = models.PositiveIntegerField()
    expires_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    # What it was not told of because it had just been told of something: made up for when the interval is over.
    owed = ArrayField(models.TextField(), default=list, blank=True, editable=False)
    notified_at = models.DateTimeField(null=True, editable=False)
    notified = models.BigIntegerField(default=0, editable=False)
    last_status = models.PositiveIntegerField(null=True, editable=False)
    last_error = models.TextField(blank=True, editable=False)

    class Meta:
        constraints: ClassVar = [
            # A worker that restarts and subscribes again is the same subscriber.
            # Digests, because an index entry holds 2,704 bytes and a URL alone may have 2,048.
            models.UniqueConstraint(
                "tenant", MD5("worker"), MD5("callback_url"), "mode", MD5("group"), name="one_subscription_per_callback"
            )
        ]
        indexes: ClassVar = [
            models.Index(fields=["expires_at"], name="subscription_expires"),
            models.Index(fields=["notified_at"], condition=~Q(owed=[]), name="subscription_owed"),
        ]

    def __str__(self) -> str:
        return str(self.pk)
