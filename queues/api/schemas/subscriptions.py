"""Subscriptions: workers that want to be told when a queue has work again."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from queues.api.schemas import CALLBACK_PATTERN, NO_NUL, Body, Command, Moment, View


class NewSubscription(Body, kw_only=True):
    """Call this address when one of these queues has work again."""

    callback_url: Annotated[str, Meta(max_length=2048, pattern=CALLBACK_PATTERN)]
    event_types: (
        Annotated[list[Command], Meta(max_length=100, description="A part of the token's; all of them if absent.")]
        | None
    ) = None
    ttl_seconds: Annotated[float, Meta(multiple_of=1, ge=1, le=86_400)] = 300
    delivery_mode: (
        Annotated[
            Literal["fanout", "group", "hash"],
            Meta(description="Everybody; one of each group in turn; always the same for a queue."),
        ]
        | None
    ) = None
    group_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=NO_NUL)] | None = None
    min_interval_seconds: Annotated[
        float, Meta(multiple_of=1, ge=0, le=86_400, description="No call sooner after the last one.")
    ] = 5


class Renewal(Body, kw_only=True):
    """Let it live on from now."""

    ttl_seconds: Annotated[float, Meta(multiple_of=1, ge=1, le=86_400, description="As before, if absent.")] | None = (
        None
    )


class Subscribed(View, kw_only=True):
    """The subscription, and until when."""

    subscription_id: UUID
    expires_at: Moment


class Ended(View, kw_only=True):
    """It is over."""

    ok: Literal[True]


class Subscription(View, kw_only=True):
    """A worker's subscription."""

    subscription_id: UUID
    callback_url: str
    event_types: list[str]
    delivery_mode: str
    group_id: str | None = None
    min_interval_seconds: int
    expires_at: Moment
    created_at: Moment


class Subscriptions(View, kw_only=True):
    """The worker's own, the oldest first."""

    subscriptions: list[Subscription]
