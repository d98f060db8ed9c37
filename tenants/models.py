"""Tenants with their issuers, memberships and signing secrets; the installation's keys."""

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

# ASCII only, so that two slugs that look the same are the same. They are compared exactly. Redis keys never contain
# them.
SLUG_PATTERN = r"^[A-Za-z0-9_.:@|/+=-]{1,128}\Z"


def mint_tid() -> str:
    """Return a random id for a new tenant."""
    return base64.b32encode(os.urandom(5)).decode("ascii").lower()


class Tenant(models.Model):
    """A tenant and its limits. An empty limit means the installation's default."""

    class Status(models.TextChoices):
        ACTIVE = "active", "active"
        SUSPENDED = "suspended", "suspended"

    # The primary key, so that foreign keys and Redis keys name a tenant by the same id.
    tid = models.CharField("id", max_length=8, primary_key=True, default=mint_tid, editable=False)
    slug = models.CharField(
        max_length=128,
        unique=True,
        validators=[RegexValidator(SLUG_PATTERN, "Use 1 to 128 letters, digits and the characters _.:@|/+=-.")],
        help_text="The value of the tenant claim in tokens.",
    )
    name = models.CharField(max_length=200, blank=True)
    status = models.CharField(max_length=10, choices=Status, default=Status.ACTIVE)

    payload_bytes = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Maximum payload size of a task, in bytes."
    )
    result_bytes = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)], help_text="Maximum result size of a task, in bytes."
    )
    depth = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum number of waiting tasks in all queues; 0 = no limit."
    )
    create_per_second = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Maximum tasks created per second; 0 = no limit.",
    )
    claim_per_second = models.FloatField(
        null=True, blank=True, validators=[MinValueValidator(0)], help_text="Maximum claims per second; 0 = no limit."
    )
    admin_per_second = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Maximum admin requests per second; 0 = no limit.",
    )
    webhook_per_second = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Maximum callbacks sent per second; 0 = no limit.",
    )
    retention_seconds = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(60)],
        help_text="Seconds for which an ended task stays in Redis.",
    )
    dead_retention_seconds = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(60)],
        help_text="Seconds for which a dead letter stays in Redis.",
    )
    is_idempotency_strict = models.BooleanField(
        null=True, blank=True, help_text="Refuse a repeated idempotency key with another body (409)."
    )
    is_lease_token_required = models.BooleanField(
        null=True, blank=True, help_text="Heartbeat, result, nack and abandon require the lease token."
    )

    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    # A trigger sets both at every change of the row or of its issuers, including changes made in SQL. `version`
    # is the number of changes. `changed_in_transaction` is the id of the last transaction that changed the row.
    # `TenantCache` polls it instead of a time, which would miss a change that commits late.
    changed_in_transaction = models.BigIntegerField(default=0, editable=False, db_index=True, db_column="changed")
    version = models.BigIntegerField(default=0, editable=False)

    class Meta:
        ordering: ClassVar = ["slug"]

    def __str__(self) -> str:
        return self.slug

    @property
    def is_suspended(self) -> bool:
        return self.status == self.Status.SUSPENDED


class TenantIssuer(models.Model):
    """A token issuer of one tenant. Its tokens are not valid for any other tenant."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="issuers")
    issuer = models.CharField(max_length=255, help_text="The `iss` claim of its tokens.")
    jwks_url = models.CharField("JWKS URL", max_length=500, blank=True, help_text="URL of its public keys.")
    jwks = models.JSONField(
        "JWKS",
        null=True,
        blank=True,
        help_text='Its public keys, instead of a URL: {"keys": […]}.',
    )
    producer_audience = models.CharField(
        max_length=255, blank=True, help_text="The `aud` claim of its producers' tokens. Empty: installation default."
    )
    worker_audience = models.CharField(
        max_length=255, blank=True, help_text="The `aud` claim of its workers' tokens. Empty: installation default."
    )

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["tenant", "issuer"], name="one_row_per_tenant_and_issuer"),
        ]

    def __str__(self) -> str:
        return f"{self.issuer} for {self.tenant_id}"

    def clean(self) -> None:
        if self.issuer == conf().auth.issuer:
            raise ValidationError({"issuer": "This issuer belongs to the installation. Enter the tenant's own issuer."})
        if bool(self.jwks_url) == bool(self.jwks):
            raise ValidationError("Enter either the keys or their URL.")
        if self.jwks and not jwks.parse_keys(self.jwks):
            raise ValidationError({"jwks": "No usable public key. Use RSA with 2048 bits or more, P-256 or Ed25519."})
        if self.jwks_url and not http_fetch.is_url(self.jwks_url):
            raise ValidationError({"jwks_url": "Enter an http or https URL."})
        if self.jwks_url and conf().production and not self.jwks_url.lower().startswith("https://"):
            raise ValidationError({"jwks_url": "Enter an https URL: in production, keys are fetched over https only."})


class TenantMembership(models.Model):
    """A user's role for one tenant in the console."""

    class Role(models.TextChoices):
        VIEWER = "viewer", "viewer: read only"
        OPERATOR = "operator", "operator: read and act on tasks"
        ADMIN = "admin", "admin: also manage issuers and secrets"

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
    """A secret that signs a tenant's webhooks. During a rotation, two secrets are active."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="signing_secrets")
    encrypted_secret = models.TextField(editable=False, db_column="sealed")
    hint = models.CharField(max_length=4, editable=False, help_text="Last characters of the secret, to identify it.")
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
        """Return the decrypted secret."""
        return secret_encryption.decrypt(self.encrypted_secret).decode("ascii")


class InstallationKey(models.Model):
    """A key pair that signs this installation's tokens, shared by all its machines."""

    kid = models.CharField(max_length=64, primary_key=True)
    encrypted_private_key = models.TextField(editable=False, db_column="sealed")
    public = models.JSONField(editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["-created_at", "kid"]

    def __str__(self) -> str:
        return self.kid
