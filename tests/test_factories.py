"""Every model has a factory, and every factory creates a valid row."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.db.models import Model

from tenants.models import Tenant
from tests.factories import FACTORIES, AttemptFactory, factory_of

APPS = ("tenants", "queues", "ranked", "webhooks", "pipeline")
MODELS = [model for app in APPS for model in apps.get_app_config(app).get_models()]


def test_every_model_has_a_factory() -> None:
    assert len(MODELS) >= 20
    assert set(MODELS) <= set(FACTORIES)


@pytest.mark.django_db
@pytest.mark.parametrize("model", FACTORIES, ids=lambda model: model._meta.label)
def test_factory_creates_valid_rows(model: type[Model]) -> None:
    row: Any
    row, _ = factory_of(model).create_batch(2)
    row.refresh_from_db()
    # `blank=False` is a rule of forms. Services may leave a field empty that has a default or is nullable.
    optional = [field.name for field in model._meta.concrete_fields if field.null or field.has_default()]
    empty = [name for name in optional if getattr(row, name) in (None, "", [])]
    row.full_clean(exclude=empty)


@pytest.mark.django_db
def test_tenant_id_creates_no_tenant() -> None:
    assert AttemptFactory(tenant_id="gone0000").tenant_id == "gone0000"
    assert not Tenant.objects.exists()
