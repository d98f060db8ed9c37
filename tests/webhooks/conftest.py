"""Receivers, settings that open the loopback to them, and deliveries that are due."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from core import url_check
from core.conf import conf
from tenants.cache import tenant_cache
from tenants.models import Tenant
from tests.webhooks.receiver import Receiver
from webhooks.models import Delivery
from webhooks.sender import Sender

Configure = Callable[..., None]
MakeReceiver = Callable[..., Receiver]
MakeDelivery = Callable[..., Delivery]


@pytest.fixture
def configure(settings: Any) -> Iterator[Configure]:
    """`configure(tries=2)`: these settings of webhooks until the end of the test."""

    def change(**values: object) -> None:
        settings.CODEQ = {**settings.CODEQ, "webhooks": {**settings.CODEQ.get("webhooks", {}), **values}}
        conf.cache_clear()

    yield change
    conf.cache_clear()


@pytest.fixture
def loopback(configure: Configure) -> None:
    """As the embedded default: callbacks may reach this machine."""
    configure(allow_hosts=["127.0.0.0/8", "::1/128"])


@pytest.fixture
def make_receiver() -> Iterator[MakeReceiver]:
    made: list[Receiver] = []

    def make(**options: Any) -> Receiver:
        made.append(Receiver(**options).start())
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def receiver(loopback: None, make_receiver: MakeReceiver) -> Receiver:
    return make_receiver()


@pytest.fixture(autouse=True)
def _no_follower() -> Iterator[None]:
    """The directory's thread would hold the test database open."""
    yield
    tenant_cache.stop()


class Clock:
    """The senders' time: stands still until it is told to move."""

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
    return Tenant.objects.create(tid="acme0001", slug="acme")


@pytest.fixture
def make_delivery(acme: Tenant, clock: Clock) -> MakeDelivery:
    """A delivery that is due."""

    def make(url: str, **fields: Any) -> Delivery:
        target = url_check.parse(url)
        usual: dict[str, Any] = {
            "tenant": acme, "task_id": uuid.uuid4(), "command": "render", "url": url, "address": target.endpoint,
            "host": target.place, "body": '{"status":"COMPLETED"}', "status": Delivery.Status.PENDING,
            "due_at": clock.now, "created_at": clock.now,
        }  # fmt: skip
        return Delivery.objects.create(**(usual | fields))

    return make


Send = Callable[..., Sender]


@pytest.fixture
def send(clock: Clock) -> Send:
    """One run of the sender: everything that is due by the clock."""

    def run(**options: Any) -> Sender:
        sender = Sender(**{"clock": clock, **options})
        asyncio.run(sender.run(lambda: True, 20))
        connections.close_all()
        return sender

    return run
