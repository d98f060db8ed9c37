"""The routes of worker subscriptions under /v1/codeq."""

from __future__ import annotations

from django.urls import path

from webhooks.api.views import RenewView, SubscriptionsView, SubscriptionView

urlpatterns = [
    path("workers/subscriptions", SubscriptionsView.as_view(), name="subscriptions"),
    path("workers/subscriptions/<str:subscription_id>", SubscriptionView.as_view(), name="subscription"),
    path("workers/subscriptions/<str:subscription_id>/heartbeat", RenewView.as_view(), name="renewal"),
]
