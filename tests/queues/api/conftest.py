"""Two tenants, and clients of the whole application for each role."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import serialization

from codeq_site.asgi import application
from core import threadpool
from queues import long_poll
from queues.models import Attempt, AuditedResult, BulkJob, QueuePolicy
from tenants import models, secret_encryption, services
from tenants.auth import installation_keys
from tenants.auth.verifier import verifier
from tenants.cache import tenant_cache
from tenants.domain import WORKER_SCOPES, TenantSnapshot
from tests.queues.api.asgi_client import Client
from webhooks.models import Delivery, Subscription

NORTH, SOUTH = "north-of-the-api-tests", "south-of-the-api-tests"
TASKS = "/v1/codeq/tasks"
Configure = Callable[..., None]
# The installation's key while the tests of a module run. Signing by `tenants.auth.installation_keys` would query the
# database.
SIGNER: dict[str, Any] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.django_db)


def delete_rows() -> None:
    """Delete the rows that requests and drains have committed, which no rollback removes."""
    for model in (AuditedResult, Attempt, BulkJob, QueuePolicy, Delivery, Subscription):
        model.objects.all().delete()


@pytest.fixture(scope="module")
def _database(django_db_setup: None, django_db_blocker: Any, valkey: object) -> Iterator[None]:
    """Commit tenants and a signing key, which other threads read, and delete them at the end."""
    with django_db_blocker.unblock():
        for slug in (NORTH, SOUTH):
            services.create_tenant(slug)
        installation_keys.rotate()
        row = models.InstallationKey.objects.get()
        SIGNER.update(
            kid=row.kid,
            key=serialization.load_pem_private_key(secret_encryption.decrypt(row.encrypted_private_key), None),
        )
        yield
        verifier.stop()
        tenant_cache.stop()
        threadpool.stop_pools()
        installation_keys.retire(row.kid)
        delete_rows()
        models.Tenant.objects.filter(slug__in=[NORTH, SOUTH]).delete()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def _registry(_database: None) -> AsyncIterator[None]:
    yield
    await long_poll.registry().close()


def make_token(role: str, tenant: str = NORTH, **claims: Any) -> str:
    """Return a valid token of this installation. A claim that is None is left out."""
    token_claims: dict[str, Any] = {
        "iss": "codeq",
        "sub": role,
        "tenantId": tenant,
        "iat": int(time.time()),
        "exp": int(time.time()) + 3600,
        "aud": "codeq-worker" if role == "worker" else "codeq-producer",
    }
    if role == "worker":
        token_claims |= {"scope": " ".join(WORKER_SCOPES), "eventTypes": ["*"]}
    if role == "admin":
        token_claims |= {"role": "ADMIN", "scope": "codeq:admin"}
    if role == "operator":
        token_claims |= {"role": "ADMIN", "scope": "codeq:admin codeq:operator"}
    token_claims |= claims
    present_claims = {name: value for name, value in token_claims.items() if value is not None}
    return jwt.encode(present_claims, SIGNER["key"], installation_keys.ALGORITHM, headers={"kid": SIGNER["kid"]})


@pytest.fixture
def client(_registry: None) -> Callable[..., Client]:
    """Return a function that makes a client: `client("worker", sub="w2", eventTypes=["A"])`."""

    def make(role: str | None = None, tenant: str = NORTH, **claims: Any) -> Client:
        return Client(application, None if role is None else make_token(role, tenant, **claims))

    return make


@pytest.fixture
def anonymous(client: Callable[..., Client]) -> Client:
    return client()


@pytest.fixture
def producer(client: Callable[..., Client]) -> Client:
    return client("producer")


@pytest.fixture
def worker(client: Callable[..., Client]) -> Client:
    return client("worker", sub="worker-1")


@pytest.fixture
def other_worker(client: Callable[..., Client]) -> Client:
    return client("worker", sub="worker-2")


@pytest.fixture
def admin(client: Callable[..., Client]) -> Client:
    return client("admin")


@pytest.fixture
def stranger(client: Callable[..., Client]) -> Client:
    """Return a producer of the other tenant."""
    return client("producer", SOUTH)


@pytest.fixture
def tenant(_registry: None) -> TenantSnapshot:
    tenant = tenant_cache.find(NORTH)
    assert tenant is not None
    return tenant


@pytest.fixture
def configure_tenant(tenant: TenantSnapshot) -> Iterator[Configure]:
    """Return a function that changes the first tenant: `configure_tenant(payload_bytes=10)`."""

    def change(**fields: Any) -> None:
        with tenant_cache._lock:
            entry = tenant_cache._by_slug[NORTH]
            changed = msgspec.structs.replace(entry.tenant, **fields)
            tenant_cache._by_slug[NORTH] = msgspec.structs.replace(entry, tenant=changed)

    yield change
    change(**{name: getattr(tenant, name) for name in tenant.__struct_fields__})
