"""Endpoints, deliveries and their attempts, circuits, and the subscriptions of workers."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import MD5

from core.admin.date_hierarchy import IndexedDateHierarchyQuerySet


class Endpoint(models.Model):
    """A receiver of callbacks that has a secret of its own, fails, or is disabled.

    Other receivers have no row: their URL is part of the task, and their requests are signed with the tenant's secret.
    """

    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, related_name="+")
    address = models.TextField(help_text="The URL without its query string.")
    description = models.TextField(blank=True)
    encrypted_secret = models.TextField(blank=True, editable=False, db_column="sealed")
    previous_encrypted_secret = models.TextField(blank=True, editable=False, db_column="former_sealed")
    previous_secret_expires_at = models.DateTimeField(null=True, editable=False, db_column="former_until")
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
    """A host that fails for one tenant.

    After enough consecutive failures it is only probed, until it responds. Circuits are per tenant, so that one
    tenant's failures on a shared host do not delay another tenant's deliveries.
    """

    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, db_index=False, related_name="+")
    host = models.TextField()
    failures = models.PositiveIntegerField(help_text="Consecutive failures.")
    paused_until = models.DateTimeField(null=True)
    updated_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "host"], name="one_circuit_per_tenant_and_host")
        ]

    def __str__(self) -> str:
        return self.host


class Delivery(models.Model):
    """A callback to an endpoint about the end of a task. Its id is the same on every attempt.

    A task that is replayed and ends again has a second delivery.
    """

    class Status(models.TextChoices):
        PENDING = "pending", "pending"
        DELIVERED = "delivered", "delivered"
        GIVEN_UP = "given up", "given up"
        HELD = "held", "held: the endpoint is disabled"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    # No foreign key constraint, as in the audit: the deliveries of a deleted tenant are kept.
    tenant = models.ForeignKey(
        "tenants.Tenant", null=True, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+"
    )
    task_id = models.UUIDField()
    command = models.TextField()
    url = models.TextField("URL")
    address = models.TextField(help_text="The URL without its query string, which identifies the endpoint.")
    host = models.TextField(help_text="Host and port, the unit of circuits and slots.")
    body = models.TextField()
    trace_parent = models.TextField(blank=True)
    trace_state = models.TextField(blank=True)
    status = models.TextField(choices=Status)
    attempts_since_replay = models.PositiveIntegerField(
        default=0, help_text="Attempts since the delivery was created or replayed.", db_column="tries"
    )
    attempts = models.PositiveIntegerField(default=0, help_text="Attempts in total.")
    due_at = models.DateTimeField(
        help_text="Time of the next attempt. During an attempt: when its reservation expires."
    )
    reservation = models.UUIDField(null=True, editable=False)
    last_status = models.PositiveIntegerField(null=True)
    last_error = models.TextField(blank=True)
    created_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    objects = IndexedDateHierarchyQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "deliveries"
        indexes: ClassVar = [
            # The due deliveries of a tenant and host in order of time, and the skip scan over tenants and hosts.
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
    """One POST of a delivery and its result."""

    delivery = models.ForeignKey(Delivery, on_delete=models.DO_NOTHING, db_constraint=False, related_name="attempt_set")
    number = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    duration_ms = models.PositiveIntegerField()
    status_code = models.PositiveIntegerField(null=True)
    error = models.TextField(blank=True)
    answer = models.TextField(blank=True, help_text="First 2 KiB of the response body.")

    class Meta:
        verbose_name = "attempt"

    def __str__(self) -> str:
        return f"{self.delivery_id} #{self.number}"


class Subscription(models.Model):
    """A worker's request to be notified when one of its queues has work again.

    Notifications are advisory: each is attempted once.
    """

    class Mode(models.TextChoices):
        FANOUT = "fanout", "fanout: every subscriber"
        GROUP = "group", "group: one subscriber of each group in turn"
        HASH = "hash", "hash: always the same subscriber for a queue"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey("tenants.Tenant", on_delete=models.CASCADE, db_index=False, related_name="+")
    worker = models.TextField()
    callback_url = models.TextField("callback URL")
    event_types = ArrayField(models.TextField())
    mode = models.TextField(choices=Mode, default=Mode.FANOUT)
    group = models.TextField(blank=True)
    ttl_seconds = models.PositiveIntegerField()
    min_interval_seconds = models.PositiveIntegerField()
    expires_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    # Queues whose notification was deferred until the minimum interval has passed.
    deferred_commands = ArrayField(models.TextField(), default=list, blank=True, editable=False, db_column="owed")
    notified_at = models.DateTimeField(null=True, editable=False)
    notified = models.BigIntegerField(default=0, editable=False)
    last_status = models.PositiveIntegerField(null=True, editable=False)
    last_error = models.TextField(blank=True, editable=False)

    class Meta:
        constraints: ClassVar = [
            # A worker that restarts and subscribes again renews its subscription. The index holds digests, because an
            # index entry has at most 2,704 bytes and a URL alone may have 2,048.
            models.UniqueConstraint(
                "tenant", MD5("worker"), MD5("callback_url"), "mode", MD5("group"), name="one_subscription_per_callback"
            )
        ]
        indexes: ClassVar = [
            models.Index(fields=["expires_at"], name="subscription_expires"),
            models.Index(fields=["notified_at"], condition=~Q(deferred_commands=[]), name="subscription_owed"),
        ]

    def __str__(self) -> str:
        return str(self.pk)
