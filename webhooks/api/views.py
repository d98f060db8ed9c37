"""The routes of worker subscriptions."""

from __future__ import annotations

from typing import Any, ClassVar

from django.http import HttpResponse
from django.utils import timezone

from core import errors, threadpool
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from queues.api.conversion import to_int
from tenants.domain import Caller
from tenants.permissions import HasScope, commands_for
from webhooks import subscriptions
from webhooks.api import schemas
from webhooks.models import Subscription

CAN_SUBSCRIBE = (HasScope("codeq:subscribe"),)
PATH_SCHEMAS = {
    "subscription_id": {"type": "string", "format": "uuid", "description": "The subscription's id."},
}


class SubscriptionsView(ApiView):
    @Operation(
        "subscribe",
        tag="Worker",
        summary="Subscribe to notifications of new work",
        permission_classes=CAN_SUBSCRIBE,
        body=schemas.NewSubscription,
        answers={200: schemas.Subscribed},
    )
    async def post(self, caller: Caller, body: schemas.NewSubscription) -> HttpResponse:
        """Create a subscription.

        A subscription of the worker with the same URL, mode and group is renewed and updated instead.
        """
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
        summary="List the worker's subscriptions",
        permission_classes=CAN_SUBSCRIBE,
        answers={200: schemas.Subscriptions},
    )
    async def get(self, caller: Caller) -> HttpResponse:
        """Return the live subscriptions of the token's `sub`."""
        rows = await threadpool.run_db(subscriptions.list_own, caller.tenant, caller.subject, timezone.now())
        return json_response(schemas.Subscriptions(subscriptions=[_details(row) for row in rows]))


class SubscriptionView(ApiView):
    path_schemas: ClassVar[dict[str, dict[str, Any]]] = PATH_SCHEMAS

    @Operation(
        "unsubscribe",
        tag="Worker",
        summary="Delete a subscription",
        permission_classes=CAN_SUBSCRIBE,
        answers={200: schemas.Unsubscribed},
        errors=(errors.NotFound,),
    )
    async def delete(self, caller: Caller, subscription_id: str) -> HttpResponse:
        """Delete a subscription of the worker. It receives no further notifications."""
        await threadpool.run_db(
            subscriptions.unsubscribe, caller.tenant, caller.subject, subscription_id, timezone.now()
        )
        return json_response(schemas.Unsubscribed(ok=True))


class RenewView(ApiView):
    path_schemas: ClassVar[dict[str, dict[str, Any]]] = PATH_SCHEMAS

    @Operation(
        "renew_subscription",
        tag="Worker",
        summary="Renew a subscription",
        permission_classes=CAN_SUBSCRIBE,
        body=schemas.Renewal,
        is_body_optional=True,
        answers={200: schemas.Subscribed},
        errors=(errors.NotFound,),
    )
    async def post(self, caller: Caller, subscription_id: str, body: schemas.Renewal) -> HttpResponse:
        """Set a subscription to expire `ttlSeconds` from now. An expired one cannot be renewed."""
        row = await threadpool.run_db(
            subscriptions.renew,
            caller.tenant,
            caller.subject,
            subscription_id,
            timezone.now(),
            ttl_seconds=to_int(body.ttl_seconds),
        )
        return json_response(_subscribed(row))


def _subscribed(row: Subscription) -> schemas.Subscribed:
    return schemas.Subscribed(subscription_id=row.pk, expires_at=row.expires_at)


def _details(row: Subscription) -> schemas.SubscriptionDetails:
    return schemas.SubscriptionDetails(
        subscription_id=row.pk,
        callback_url=row.callback_url,
        event_types=row.event_types,
        delivery_mode=row.mode,
        group_id=row.group or None,
        min_interval_seconds=row.min_interval_seconds,
        expires_at=row.expires_at,
        created_at=row.created_at,
    )
