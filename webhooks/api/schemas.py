"""Request and response bodies of the subscription routes."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from queues.api.schemas import CALLBACK_PATTERN, NO_NUL, Command, Moment, RequestBody, ResponseBody


class NewSubscription(RequestBody, kw_only=True):
    """A subscription to create or renew."""

    callback_url: Annotated[str, Meta(max_length=2048, pattern=CALLBACK_PATTERN)]
    event_types: (
        Annotated[
            list[Command],
            Meta(
                max_length=100, description="The queues: a subset of the token's `eventTypes`. If absent, all of them."
            ),
        ]
        | None
    ) = None
    ttl_seconds: Annotated[float, Meta(multiple_of=1, ge=1, le=86_400)] = 300
    delivery_mode: (
        Annotated[
            Literal["fanout", "group", "hash"],
            Meta(
                description="`fanout` notifies every subscriber, `group` one subscriber of each group in turn, `hash` "
                "always the same subscriber for a queue."
            ),
        ]
        | None
    ) = None
    group_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=NO_NUL)] | None = None
    min_interval_seconds: Annotated[
        float, Meta(multiple_of=1, ge=0, le=86_400, description="Minimum seconds between two notifications.")
    ] = 5


class Renewal(RequestBody, kw_only=True):
    """The extension of a subscription."""

    ttl_seconds: (
        Annotated[
            float, Meta(multiple_of=1, ge=1, le=86_400, description="If absent, the subscription's last value applies.")
        ]
        | None
    ) = None


class Subscribed(ResponseBody, kw_only=True):
    """The subscription's id and expiry time."""

    subscription_id: UUID
    expires_at: Moment


class Unsubscribed(ResponseBody, kw_only=True):
    """The subscription was deleted."""

    ok: Literal[True]


class SubscriptionDetails(ResponseBody, kw_only=True):
    """A subscription of a worker."""

    subscription_id: UUID
    callback_url: str
    event_types: list[str]
    delivery_mode: str
    group_id: str | None = None
    min_interval_seconds: int
    expires_at: Moment
    created_at: Moment


class Subscriptions(ResponseBody, kw_only=True):
    """The worker's subscriptions, oldest first."""

    subscriptions: list[SubscriptionDetails]
