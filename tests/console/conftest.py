"""Fixtures: two tenants, clients with roles, and rows of every model."""

from __future__ import annotations

import pytest
from django.test import Client

from tests.console.rows import CANARY, Rows
from tests.console.work import Login, create_queue
from tests.factories import TenantMembershipFactory, UserFactory
from tests.fixtures.queues import Queue


@pytest.fixture(autouse=True)
def _always_stop_tenant_cache(stop_tenant_cache: None) -> None:
    """Use the fixture in every test of this directory."""


@pytest.fixture
def acme(db: None) -> Queue:
    return create_queue("acme", "render")


@pytest.fixture
def zeta(db: None) -> Queue:
    """A queue of another tenant.

    Its names contain CANARY, which staff of acme may not see on any page.
    """
    return create_queue("kanarie-zeta", "kanarie.send")


@pytest.fixture
def login(acme: Queue) -> Login:
    """A function that logs in a member of staff.

    `login("operator")` has this role in acme, `login(None)` has no role, `login("root")` is a superuser.
    """

    def log_in(role: str | None, *, enforce_csrf_checks: bool = False) -> Client:
        user = UserFactory(username=f"staff-{role}", is_superuser=role == "root")
        if role not in {None, "root"}:
            TenantMembershipFactory(tenant_id=acme.tenant.tid, user=user, role=role)
        client = Client(enforce_csrf_checks=enforce_csrf_checks)
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def mine(acme: Queue) -> Rows:
    return Rows(acme, "mine")


@pytest.fixture
def foreign(zeta: Queue) -> Rows:
    return Rows(zeta, CANARY)
