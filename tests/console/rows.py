"""A row of every model in the admin. A new model needs a factory and no code here."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db.models import CharField, Model, TextField
from django.test import RequestFactory

from tenants.models import Tenant
from tests.factories import UserFactory, factory_of
from tests.fixtures.queues import Queue

# A word in every row of the other tenant. A page that shows it shows data of that tenant.
CANARY = "kanarie"
ALL: list[type[Model]] = sorted(admin.site._registry, key=lambda model: model._meta.label)
SUPERUSER_REQUEST = RequestFactory().get("/")
SUPERUSER_REQUEST.user = User(username="root", is_staff=True, is_superuser=True)


def url_prefix(model: type[Model]) -> str:
    """Return the first part of the names of the model's admin URLs."""
    return f"{model._meta.app_label}_{model._meta.model_name}"


def label_of(model: Any) -> str:
    return str(getattr(getattr(model, "_meta", None), "label", model))


def create_row(model: type[Model], tenant: Tenant, word: str) -> Model:
    """Create a row of this tenant with `word` in every text column that has no choices."""
    if model is Tenant:
        return tenant
    columns = {field.name: field for field in model._meta.concrete_fields}
    values: dict[str, Any] = {
        name: word[: field.max_length]
        for name, field in columns.items()
        if isinstance(field, CharField | TextField) and not field.choices and name != "object_id"
    }
    if "tenant" in columns or model is LogEntry:
        values["tenant"] = tenant
    if "user" in columns:
        person = f"{word}-person"
        values["user"] = User.objects.filter(username=person).first() or UserFactory(username=person)
    if "jwks" in columns:
        values["jwks"] = {"keys": word}
    return factory_of(model)(**values)


class Rows:
    """A row of every model, of one tenant."""

    def __init__(self, queue: Queue, word: str) -> None:
        self.tenant = Tenant.objects.get(pk=queue.tenant.tid)
        self.rows = {model: create_row(model, self.tenant, word) for model in ALL}

    def pk(self, model: type[Model]) -> str:
        return str(self.rows[model].pk)

    def state(self) -> Any:
        """Read everything that an action could change."""
        values = {
            model._meta.label: model._default_manager.filter(pk=row.pk).values().first()
            for model, row in self.rows.items()
        }
        secrets = Tenant.objects.filter(pk=self.tenant.pk).values_list("signing_secrets", flat=True)
        return values, list(secrets.order_by("signing_secrets"))
