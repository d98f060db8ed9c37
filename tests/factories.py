"""Factories of rows, one per model.

`AttemptFactory(worker="w-1")` creates a row and the rows it refers to; `AttemptFactory.build()` saves nothing. A test
sets only the columns that it is about.
"""

from __future__ import annotations

import base64
import os
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar

import factory
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.utils import timezone
from factory import LazyAttribute, LazyFunction, SelfAttribute, Sequence, SubFactory
from factory.django import DjangoModelFactory
from jwt.algorithms import ECAlgorithm

from core import url_check
from pipeline import models as pipeline
from queues import models as queues
from ranked import models as ranked
from tenants import models as tenants
from tenants import secret_encryption
from webhooks import models as webhooks

M = TypeVar("M", bound=Model)
# The day of the marts' rows.
DAY = date(2026, 3, 10)


def to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class UserFactory(DjangoModelFactory[User]):
    """A member of staff without a password: tests log in by `Client.force_login`."""

    class Meta:
        model = User

    username = Sequence(lambda number: f"user-{number}")
    password = LazyFunction(lambda: make_password(None))
    is_staff = True


class TenantFactory(DjangoModelFactory[tenants.Tenant]):
    class Meta:
        model = tenants.Tenant

    slug = Sequence(lambda number: f"tenant-{number}")


class OfTenantFactory(DjangoModelFactory[M]):
    """Base class for rows of a tenant.

    With `tenant_id=…`, no tenant is created.
    """

    class Meta:
        abstract = True

    tenant = SubFactory(TenantFactory)

    @classmethod
    def _generate(cls, strategy: str, params: dict[str, Any]) -> M:
        if "tenant_id" in params:
            params = {**params, "tenant": None}
        return super()._generate(strategy, params)

    @classmethod
    def _adjust_kwargs(cls, **kwargs: Any) -> dict[str, Any]:
        if "tenant_id" in kwargs:
            del kwargs["tenant"]
        return kwargs


class TenantIssuerFactory(OfTenantFactory[tenants.TenantIssuer]):
    class Meta:
        model = tenants.TenantIssuer

    issuer = Sequence(lambda number: f"https://issuer-{number}.example.com")
    jwks_url = LazyAttribute(lambda row: "" if getattr(row, "jwks", None) else "https://issuer.example.com/jwks.json")


class TenantMembershipFactory(OfTenantFactory[tenants.TenantMembership]):
    class Meta:
        model = tenants.TenantMembership

    user = SubFactory(UserFactory)
    role = tenants.TenantMembership.Role.VIEWER


class SigningSecretFactory(OfTenantFactory[tenants.SigningSecret]):
    class Meta:
        model = tenants.SigningSecret

    class Params:
        secret = LazyFunction(lambda: "whsec_" + base64.b64encode(os.urandom(24)).decode("ascii"))

    encrypted_secret = LazyAttribute(lambda row: secret_encryption.encrypt(row.secret.encode()))
    hint = LazyAttribute(lambda row: row.secret[-5:-1])


class InstallationKeyFactory(DjangoModelFactory[tenants.InstallationKey]):
    class Meta:
        model = tenants.InstallationKey

    class Params:
        private = LazyFunction(lambda: ec.generate_private_key(ec.SECP256R1()))

    kid = Sequence(lambda number: f"key-{number}")
    encrypted_private_key = LazyAttribute(lambda row: secret_encryption.encrypt(to_pem(row.private)))
    public = LazyAttribute(
        lambda row: {
            **ECAlgorithm.to_jwk(row.private.public_key(), as_dict=True),
            "kid": row.kid,
            "use": "sig",
            "alg": "ES256",
        }
    )


class AttemptFactory(OfTenantFactory[queues.Attempt]):
    """A completed attempt that waited one second and ran two."""

    class Meta:
        model = queues.Attempt

    task_id = LazyFunction(uuid.uuid4)
    number = 1
    command = "render"
    priority = 0
    ended_at = LazyFunction(timezone.now)
    claimed_at = LazyAttribute(lambda row: row.ended_at - timedelta(seconds=2))
    visible_at = LazyAttribute(lambda row: row.claimed_at - timedelta(seconds=1))
    created_at = SelfAttribute("visible_at")
    outcome = "COMPLETED"
    status = "COMPLETED"
    worker = "w-1"
    payload_bytes = 2
    result_bytes = 11


class AuditedResultFactory(OfTenantFactory[queues.AuditedResult]):
    """A completed task, or with `is_dead_letter=True` one whose only attempt failed."""

    class Meta:
        model = queues.AuditedResult

    class Params:
        is_dead_letter = factory.Trait(
            is_dead=True,
            status="FAILED",
            outcome="NACKED",
            error="boom",
            result="",
            attempts=1,
            max_attempts=1,
        )

    task_id = LazyFunction(uuid.uuid4)
    command = "render"
    priority = 0
    payload = "{}"
    status = "COMPLETED"
    outcome = "COMPLETED"
    is_dead = False
    result = '{"ok":true}'
    attempts = 0
    deliveries = 1
    max_attempts = 5
    worker = "w-1"
    ended_at = LazyFunction(timezone.now)
    created_at = SelfAttribute("ended_at")
    position = 1


class QuarantineFactory(DjangoModelFactory[queues.Quarantine]):
    """An entry whose task id is not a UUID."""

    class Meta:
        model = queues.Quarantine

    partition = 1
    stream_id = Sequence(lambda number: f"{number}-1")
    reason = "odd"
    raw = msgspec.msgpack.encode(({b"id": b"not-a-uuid"}, []))


class PeriodicTaskRunFactory(DjangoModelFactory[queues.PeriodicTaskRun]):
    class Meta:
        model = queues.PeriodicTaskRun

    name = Sequence(lambda number: f"job-{number}")
    task = LazyAttribute(lambda row: f"queues.{row.name}")
    every_seconds = 1
    ended_at = LazyFunction(timezone.now)
    started_at = SelfAttribute("ended_at")


class QueueSampleFactory(OfTenantFactory[queues.QueueSample]):
    """A minute of a queue in which nothing happened."""

    class Meta:
        model = queues.QueueSample

    command = "render"
    at = LazyFunction(lambda: timezone.now().replace(second=0, microsecond=0))
    ready = 0
    delayed = 0
    in_progress = 0
    dead = 0
    arrived = 0
    completed = 0
    failed = 0
    died = 0
    returned = 0
    cancelled = 0


class BulkJobFactory(OfTenantFactory[queues.BulkJob]):
    """A replay of all dead letters that has started."""

    class Meta:
        model = queues.BulkJob

    id = LazyFunction(uuid.uuid4)
    kind = queues.BulkJob.Kind.REPLAY
    filter = "{}"
    actor = "ada"
    created_at = LazyFunction(timezone.now)
    before = SelfAttribute("created_at")
    started_at = SelfAttribute("created_at")


class BulkItemFactory(DjangoModelFactory[queues.BulkItem]):
    class Meta:
        model = queues.BulkItem

    job = SubFactory(BulkJobFactory)
    task_id = LazyFunction(uuid.uuid4)


class QueuePolicyFactory(OfTenantFactory[queues.QueuePolicy]):
    class Meta:
        model = queues.QueuePolicy

    command = "render"


class RankedEntryFactory(OfTenantFactory[ranked.RankedEntry]):
    class Meta:
        model = ranked.RankedEntry

    queue = "reviews"
    task_id = Sequence(lambda number: f"t{number}")
    rank = 50


class EndpointFactory(OfTenantFactory[webhooks.Endpoint]):
    class Meta:
        model = webhooks.Endpoint

    address = Sequence(lambda number: f"https://hooks-{number}.example.com/codeq")


class CircuitFactory(OfTenantFactory[webhooks.Circuit]):
    class Meta:
        model = webhooks.Circuit

    host = Sequence(lambda number: f"hooks-{number}.example.com:443")
    failures = 1
    updated_at = LazyFunction(timezone.now)


class DeliveryFactory(OfTenantFactory[webhooks.Delivery]):
    """A delivery that is due and has not been attempted."""

    class Meta:
        model = webhooks.Delivery

    task_id = LazyFunction(uuid.uuid4)
    command = "render"
    url = "https://hooks.example.com/codeq"
    address = LazyAttribute(lambda row: url_check.parse(row.url).endpoint_url)
    host = LazyAttribute(lambda row: url_check.parse(row.url).host_and_port)
    body = '{"status":"COMPLETED"}'
    status = webhooks.Delivery.Status.PENDING
    created_at = LazyFunction(timezone.now)
    due_at = SelfAttribute("created_at")


class DeliveryAttemptFactory(DjangoModelFactory[webhooks.DeliveryAttempt]):
    class Meta:
        model = webhooks.DeliveryAttempt

    delivery = SubFactory(DeliveryFactory)
    number = 1
    started_at = LazyFunction(timezone.now)
    duration_ms = 12
    status_code = 200


class SubscriptionFactory(OfTenantFactory[webhooks.Subscription]):
    """A subscription to all queues, for an hour."""

    class Meta:
        model = webhooks.Subscription

    worker = "w-1"
    callback_url = Sequence(lambda number: f"https://worker-{number}.example.com/wake")
    event_types = LazyFunction(lambda: ["*"])
    ttl_seconds = 3600
    min_interval_seconds = 0
    expires_at = LazyAttribute(lambda row: timezone.now() + timedelta(seconds=row.ttl_seconds))


class MartFactory(OfTenantFactory[M]):
    """Base class for rows of the marts, on `DAY`."""

    class Meta:
        abstract = True

    date = DAY


class HourlyMartFactory(MartFactory[M]):
    """Base class for rows of the hourly marts. The hour begins at 09:00 UTC."""

    class Meta:
        abstract = True

    command = "render"
    hour = LazyAttribute(lambda row: datetime(row.date.year, row.date.month, row.date.day, 9, tzinfo=UTC))


class ThroughputFactory(HourlyMartFactory[pipeline.Throughput]):
    class Meta:
        model = pipeline.Throughput

    attempts = 10
    completed = 6
    failed = 1
    nacked = 1
    abandoned = 1
    expired = 1
    cancelled = 0
    retries = 3
    ended = 7
    dead = 1


class LatencyFactory(HourlyMartFactory[pipeline.Latency]):
    class Meta:
        model = pipeline.Latency

    attempts = 10
    wait_mean_ms = 800.5
    wait_p50_ms = 700
    wait_p95_ms = 1500
    wait_p99_ms = 8000
    wait_max_ms = 2**40
    run_mean_ms = 40.25
    run_p50_ms = 30
    run_p95_ms = 90
    run_p99_ms = 120
    run_max_ms = 2**40


class FailureFactory(MartFactory[pipeline.Failure]):
    class Meta:
        model = pipeline.Failure

    command = "render"
    fingerprint = "render: disk full"
    attempts = 3
    dead = 1
    first_at = LazyAttribute(lambda row: datetime(row.date.year, row.date.month, row.date.day, 9, tzinfo=UTC))
    last_at = SelfAttribute("first_at")
    example = LazyFunction(lambda: str(uuid.uuid4()))


class UsageFactory(MartFactory[pipeline.Usage]):
    class Meta:
        model = pipeline.Usage

    tasks = 10
    attempts = 12
    compute_ms = 90_000
    payload_bytes = 4096
    result_bytes = 1024
    delivered_bytes = 2**40


class CapacityFactory(HourlyMartFactory[pipeline.Capacity]):
    class Meta:
        model = pipeline.Capacity

    arrivals = 100
    service_mean_ms = 40.25
    service_cv2 = 1.5
    load = 2.5
    wait_mean_ms = 800.5
    workers_1s = 9
    workers_10s = 6
    workers_60s = 4


class LeaseAdviceFactory(MartFactory[pipeline.LeaseAdvice]):
    class Meta:
        model = pipeline.LeaseAdvice

    command = "render"
    attempts = 15
    completed = 10
    expired = 2
    run_p50_ms = 30
    run_p99_ms = 120
    run_max_ms = 2**40
    duplicate_ms = 60_000
    lease_advice_seconds = 180
    max_attempts_advice = 4


class WebhookHealthFactory(MartFactory[pipeline.WebhookHealth]):
    class Meta:
        model = pipeline.WebhookHealth

    endpoint = "https://hooks.example.com/codeq"
    hour = LazyAttribute(lambda row: datetime(row.date.year, row.date.month, row.date.day, 9, tzinfo=UTC))
    attempts = 4
    delivered = 2
    refused = 1
    unreachable = 1
    latency_p50_ms = 30
    latency_p95_ms = 250
    latency_p99_ms = 500
    latency_max_ms = 2**40


class PublishedFactory(OfTenantFactory[pipeline.Published]):
    class Meta:
        model = pipeline.Published

    mart = "latency"
    date = DAY
    source = "0" * 64


class RunLogFactory(DjangoModelFactory[pipeline.RunLog]):
    """A Spark job that succeeded."""

    class Meta:
        model = pipeline.RunLog

    run = LazyFunction(uuid.uuid4)
    job = "publish"
    state = pipeline.RunLog.JobState.SUCCEEDED
    master = "local[2]"
    started_at = LazyFunction(timezone.now)
    ended_at = SelfAttribute("started_at")


class LogEntryFactory(DjangoModelFactory[LogEntry]):
    """An entry of the admin's log about a tenant."""

    class Meta:
        model = LogEntry

    class Params:
        tenant = SubFactory(TenantFactory)

    user = SubFactory(UserFactory)
    action_flag = CHANGE
    content_type = LazyFunction(lambda: ContentType.objects.get_for_model(tenants.Tenant))
    object_id = LazyAttribute(lambda row: row.tenant.pk)
    object_repr = LazyAttribute(lambda row: row.tenant.slug)
    change_message = "Paused queue render: maintenance"


FACTORIES: dict[type[Model], type[DjangoModelFactory[Any]]] = {
    value._meta.model: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, DjangoModelFactory) and not value._meta.abstract
}


def factory_of(model: type[M]) -> type[DjangoModelFactory[M]]:
    return FACTORIES[model]
