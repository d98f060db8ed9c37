"""The routes of subscriptions: workers that want to be told when a queue has work again."""

from __future__ import annotations

from django.http import HttpResponse
from django.utils import timezone

from core import errors, threadpool
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from queues.api.conversion import whole
from queues.api.schemas import subscriptions as wire
from tenants.permissions import HasScope, commands_for
from tenants.tenant import Caller
from webhooks import subscriptions
from webhooks.models import Subscription

MAY = (HasScope("codeq:subscribe"),)


class SubscriptionsView(ApiView):
    @Operation(
        "subscribe",
        tag="Worker",
        summary="Be told when a queue has work again",
        may=MAY,
        body=wire.NewSubscription,
        answers={200: wire.Subscribed},
    )
    async def post(self, caller: Caller, body: wire.NewSubscription) -> HttpResponse:
        """The same worker, address, mode and group again is the same subscription, renewed."""
        row = await threadpool.run_db(
            subscriptions.subscribe,
            caller.tenant,
            caller.subject,
            body.callback_url,
            commands_for(caller, body.event_types),
            now=timezone.now(),
            ttl_seconds=int(body.ttl_seconds),
            mode=body.delivery_mode,
            group=body.group_id or "",
            min_interval_seconds=int(body.min_interval_seconds),
            worker_group=caller.group,
        )
        return json_response(_subscribed(row))

    @Operation(
        "list_subscriptions",
        tag="Worker",
        summary="List one's own subscriptions",
        may=MAY,
        answers={200: wire.Subscriptions},
    )
    async def get(self, caller: Caller) -> HttpResponse:
        """Those of the token's `sub` that have not expired."""
        rows = await threadpool.run_db(subscriptions.own, caller.tenant, caller.subject, timezone.now())
        return json_response(wire.Subscriptions(subscriptions=[_subscription(row) for row in rows]))


class SubscriptionView(ApiView):
    @Operation(
        "unsubscribe",
        tag="Worker",
        summary="Be told no more",
        may=MAY,
        answers={200: wire.Ended},
        errors=(errors.NotFound,),
    )
    async def delete(self, caller: Caller, subscription_id: str) -> HttpResponse:
        """At once."""
        await threadpool.run_db(subscriptions.end, caller.tenant, caller.subject, subscription_id, timezone.now())
        return json_response(wire.Ended(ok=True))


class RenewView(ApiView):
    @Operation(
        "renew_subscription",
        tag="Worker",
        summary="Renew a subscription",
        may=MAY,
        body=wire.Renewal,
        is_body_optional=True,
        answers={200: wire.Subscribed},
        errors=(errors.NotFound,),
    )
    async def post(self, caller: Caller, subscription_id: str, body: wire.Renewal) -> HttpResponse:
        """It then lives `ttlSeconds` from now. One that has expired is gone."""
        row = await threadpool.run_db(
            subscriptions.renew,
            caller.tenant,
            caller.subject,
            subscription_id,
            timezone.now(),
            ttl_seconds=whole(body.ttl_seconds),
        )
        return json_response(_subscribed(row))


def _subscribed(row: Subscription) -> wire.Subscribed:
    return wire.Subscribed(subscription_id=row.pk, expires_at=row.expires_at)


def _subscription(row: Subscription) -> wire.Subscription:
    return wire.Subscription(
        subscription_id=row.pk,
        callback_url=row.callback_url,
        event_types=row.event_types,
        delivery_mode=row.mode,
        group_id=row.group or None,
        min_interval_seconds=row.min_interval_seconds,
        expires_at=row.expires_at,
        created_at=row.created_at,
    )
