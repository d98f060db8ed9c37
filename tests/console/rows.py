"""A row of every model that the admin shows, made by what its fields are: a new model is covered as it comes."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from typing import Any

import msgspec
from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Model

from tenants.models import Tenant
from tests.fixtures.queues import Queue

CANARY = "kanarie"
NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
ALL: list[type[Model]] = sorted(admin.site._registry, key=lambda model: model._meta.label)


def name_of(model: type[Model]) -> str:
    return f"{model._meta.app_label}_{model._meta.model_name}"


def label_of(model: Any) -> str:
    return str(getattr(getattr(model, "_meta", None), "label", model))


def row_of(model: type[Model], tenant: Tenant, word: str) -> Model:
    """A row of this tenant in which everything that can be said is `word`."""
    if model is Tenant:
        return tenant
    if model is LogEntry:
        return LogEntry.objects.create(
            user=User.objects.get_or_create(username=f"{word}-person")[0], action_flag=CHANGE, object_id=tenant.pk,
            content_type=ContentType.objects.get_for_model(Tenant), object_repr=tenant.slug, change_message=word,
        )  # fmt: skip
    given = {field.name: value_of(field, tenant, word) for field in model._meta.concrete_fields if is_said(field)}
    return model._default_manager.create(**given)


def is_said(field: Any) -> bool:
    if (
        isinstance(field, models.AutoField)
        or getattr(field, "auto_now", False)
        or getattr(field, "auto_now_add", False)
    ):
        return False
    return not field.has_default() or isinstance(field, models.TextField)


def value_of(field: Any, tenant: Tenant, word: str) -> Any:
    if field.choices:
        return field.choices[0][0]
    if isinstance(field, models.ForeignKey):
        if field.related_model is Tenant:
            return tenant
        if field.related_model is User:
            return User.objects.get_or_create(username=f"{word}-person")[0]
        return None if field.null else row_of(field.related_model, tenant, word)
    for kind, value in (
        (models.DateTimeField, NOW), (models.DateField, date(2026, 10, 1)), (models.UUIDField, uuid.uuid4()),
        (models.BooleanField, False), (ArrayField, []), (models.JSONField, {"keys": word}),
        (models.BinaryField, msgspec.msgpack.encode(({}, []))), ((models.IntegerField, models.FloatField), 1),
        ((models.TextField, models.CharField), word[: getattr(field, "max_length", None) or 100]),
    ):  # fmt: skip
        if isinstance(field, kind):
            return value
    raise AssertionError(f"{field}: say in value_of what a row has here")


class Rows:
    """A row of every model, of one tenant."""

    def __init__(self, queue: Queue, word: str) -> None:
        self.tenant = Tenant.objects.get(pk=queue.tenant.tid)
        self.rows = {model: row_of(model, self.tenant, word) for model in ALL}

    def pk(self, model: type[Model]) -> str:
        return str(self.rows[model].pk)

    def state(self) -> Any:
        """All that could have been changed."""
        found = {
            model._meta.label: model._default_manager.filter(pk=row.pk).values().first()
            for model, row in self.rows.items()
        }
        secrets = Tenant.objects.filter(pk=self.tenant.pk).values_list("signing_secrets", flat=True)
        return found, list(secrets.order_by("signing_secrets"))
