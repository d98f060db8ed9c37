"""Fixtures: receivers, settings that allow webhooks to them, and due deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from core.conf import conf
from tenants.models import Tenant
from tests.factories import DeliveryFactory, TenantFactory
from tests.webhooks.receiver import Receiver
from webhooks.models import Delivery
from webhooks.sender import Sender

Configure = Callable[..., None]
MakeReceiver = Callable[..., Receiver]
MakeDelivery = Callable[..., Delivery]


@pytest.fixture
def configure(settings: Any) -> Iterator[Configure]:
    """`configure(quick_attempts=2)` changes webhook settings until the end of the test."""

    def change(**values: object) -> None:
        settings.CODEQ = {**settings.CODEQ, "webhooks": {**settings.CODEQ.get("webhooks", {}), **values}}
        conf.cache_clear()

    yield change
    conf.cache_clear()


@pytest.fixture
def loopback(configure: Configure) -> None:
    """Allow callbacks to the loopback, as `manage.py up` does."""
    configure(allow_hosts=["127.0.0.0/8", "::1/128"])


@pytest.fixture
def make_receiver() -> Iterator[MakeReceiver]:
    receivers: list[Receiver] = []

    def make(**options: Any) -> Receiver:
        receivers.append(Receiver(**options).start())
        return receivers[-1]

    yield make
    for receiver in receivers:
        receiver.stop()


@pytest.fixture
def receiver(loopback: None, make_receiver: MakeReceiver) -> Receiver:
    return make_receiver()


@pytest.fixture(autouse=True)
def _always_stop_tenant_cache(stop_tenant_cache: None) -> None:
    """Use the fixture in every test of this directory."""


class Clock:
    """The clock of senders: it stands still until `advance`."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC).replace(microsecond=0)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **by: float) -> None:
        self.now += timedelta(**by)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def acme() -> Tenant:
    return TenantFactory(tid="acme0001", slug="acme")


@pytest.fixture
def make_delivery(acme: Tenant, clock: Clock) -> MakeDelivery:
    """`make_delivery(url)` creates a delivery that is due."""

    def make(url: str, **fields: Any) -> Delivery:
        return DeliveryFactory(url=url, **({"tenant": acme, "created_at": clock.now} | fields))

    return make


Send = Callable[..., Sender]


@pytest.fixture
def send(clock: Clock) -> Send:
    """`send()` runs a sender once, for everything that is due by the clock."""

    def run(**options: Any) -> Sender:
        sender = Sender(**{"clock": clock, **options})
        asyncio.run(sender.run(lambda: True, 20))
        connections.close_all()
        return sender

    return run
