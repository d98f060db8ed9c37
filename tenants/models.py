"""Tenants, who may look after them, who signs their tokens, and the secrets kept for them."""

from __future__ import annotations

import base64
import os
from typing import ClassVar

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.utils import timezone

from core.conf import conf
from tenants import http_fetch, secret_encryption
from tenants.auth import jwks

# ASCII only: two names that look the same are the same. A name is compared exactly and never part of a key.
SLUG_PATTERN = r"^[A-Za-z0-9_.:@|/+=-]{1,128}\Z"


def mint_tid() -> str:
    return base64.b32encode(os.urandom(5)).decode("ascii").lower()


class Tenant(models.Model):
    """One tenant and its limits. An empty limit means the installation's default."""

    class Status(models.TextChoices):
        ACTIVE = "active", "active"
        SUSPENDED = "suspended", "suspended"

    # The primary key, so that a foreign key and a Redis key name a tenant by the same word.
    tid = models.CharField("id", max_length=8, primary_key=True, default=mint_tid, editable=False)
    slug = models.CharField(
        max_length=128,
        unique=True,
        validators=[RegexValidator(SLUG_PATTERN, "Letters, digits and _.:@|/+=- only, 128 at most.")],
        help_text="What the tokens' tenant claim says.",
    )
    name = models.CharField(max_length=200, blank=True)
    status = models.CharField(max_length=10, choices=Status, default=Status.ACTIVE)

    payload_bytes = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Largest payload of a task."
    )
    result_bytes = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Largest result."
    )
    depth = models.PositiveIntegerField(
        null=True, blank=True, help_text="Tasks that may wait in its queues; 0 = as many as fit."
    )
    create_per_second = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Tasks created a second; 0 = no limit.",
    )
    claim_per_second = models.FloatField(
        null=True, blank=True, validators=[MinValueValidator(0)], help_text="Claims a second; 0 = no limit."
    )
    admin_per_second = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Admin calls a second; 0 = no limit.",
    )
    webhook_per_second = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Callbacks sent a second; 0 = no limit.",
    )
    retention_seconds = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(60)],
        help_text="How long an ended task stays live.",
    )
    dead_retention_seconds = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(60)], help_text="How long a dead letter stays."
    )
    is_idempotency_strict = models.BooleanField(
        null=True, blank=True, help_text="A repeated key with another body is refused (409)."
    )
    is_lease_token_required = models.BooleanField(
        null=True, blank=True, help_text="Heartbeat, result, nack and abandon must send the lease token."
    )

    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    # Both are set by a trigger at every change of the row or of its issuers, whoever makes it, and are what
    # directory.py follows: the transaction that made the change (a clock would miss one that commits after a
    # later one was seen), and how many changes there were.
    changed = models.BigIntegerField(default=0, editable=False, db_index=True)
    version = models.BigIntegerField(default=0, editable=False)

    class Meta:
        ordering: ClassVar = ["slug"]

    def __str__(self) -> str:
        return self.slug

    @property
    def is_suspended(self) -> bool:
        return self.status == self.Status.SUSPENDED


class TenantIssuer(models.Model):
    """Somebody whose tokens speak for one tenant, and for no other whatever they claim."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="issuers")
    issuer = models.CharField(max_length=255, help_text="`iss` of its tokens.")
    jwks_url = models.CharField("JWKS URL", max_length=500, blank=True, help_text="Where its public keys are.")
    jwks = models.JSONField(
        "JWKS",
        null=True,
        blank=True,
        help_text='Its public keys themselves: {"keys": […]}, instead of a URL.',
    )
    producer_audience = models.CharField(
        max_length=255, blank=True, help_text="`aud` of its producers' tokens. Empty = the installation's."
    )
    worker_audience = models.CharField(
        max_length=255, blank=True, help_text="`aud` of its workers' tokens. Empty = the installation's."
    )

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "issuer"], name="one_row_per_tenant_and_issuer"),
        ]

    def __str__(self) -> str:
        return f"{self.issuer} for {self.tenant_id}"

    def clean(self) -> None:
        if self.issuer == conf().auth.issuer:
            raise ValidationError({"issuer": "This is the installation's own issuer."})
        if bool(self.jwks_url) == bool(self.jwks):
            raise ValidationError("Give either the keys or the URL where they are.")
        if self.jwks and not jwks.keys_of(self.jwks):
            raise ValidationError({"jwks": "No usable public key (RSA ≥ 2048 bit, P-256 or Ed25519) in it."})
        if self.jwks_url and not http_fetch.is_url(self.jwks_url):
            raise ValidationError({"jwks_url": "Not an http(s) URL."})
        if self.jwks_url and conf().production and not self.jwks_url.lower().startswith("https://"):
            raise ValidationError({"jwks_url": "Keys are fetched over https only."})


class TenantMembership(models.Model):
    """A member of staff and what they may do for one tenant in the console."""

    class Role(models.TextChoices):
        VIEWER = "viewer", "viewer: sees"
        OPERATOR = "operator", "operator: sees and acts on tasks"
        ADMIN = "admin", "admin: the tenant's issuers and secrets too"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="tenant_memberships")
    role = models.CharField(max_length=10, choices=Role, default=Role.VIEWER)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "user"], name="one_membership_per_tenant_and_user"),
        ]

    def __str__(self) -> str:
        return f"{self.user} is {self.role} of {self.tenant}"


class SigningSecret(models.Model):
    """The secret that signs a tenant's webhooks. Two are in force while one replaces the other."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="signing_secrets")
    sealed = models.TextField(editable=False)
    hint = models.CharField(max_length=4, editable=False, help_text="Its last characters, to tell two apart.")
    created_at = models.DateTimeField(auto_now_add=True)
    retires_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering: ClassVar = ["-created_at", "-pk"]
        indexes: ClassVar = [models.Index(fields=["tenant", "retires_at"], name="signing_secret_in_force")]

    def __str__(self) -> str:
        return f"whsec_…{self.hint}"

    @property
    def is_active(self) -> bool:
        return self.retires_at is None or self.retires_at > timezone.now()

    def reveal(self) -> str:
        """The secret in clear, as its owner was shown it once."""
        return secret_encryption.decrypt(self.sealed).decode("ascii")


class InstallationKey(models.Model):
    """A key pair this installation signs its own tokens with, shared by its machines through this row."""

    kid = models.CharField(max_length=64, primary_key=True)
    sealed = models.TextField(editable=False)
    public = models.JSONField(editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["-created_at", "kid"]

    def __str__(self) -> str:
        return self.kid
