"""The paths of the site. The API's paths come first because they get most requests."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularRedocView, SpectacularSwaggerView

from codeq_site.views import MetricsView
from core.admin.login_throttle import login
from core.http import health
from tenants.views import JwksView

urlpatterns = [
    path("v1/codeq/", include("queues.api.urls")),
    path("v1/codeq/", include("webhooks.api.urls")),
    path("v1/codeq/", include("pipeline.api.urls")),
    # The bare host name leads to the console.
    path("", RedirectView.as_view(pattern_name="console:overview")),
    path("healthz", health.HealthView.as_view(), name="healthz"),
    path("readyz", health.ReadyView.as_view(), name="readyz"),
    path("metrics", MetricsView.as_view(), name="metrics"),
    path(".well-known/jwks.json", JwksView.as_view(), name="jwks"),
    path("api/schema/", SpectacularAPIView.as_view(), name="schema"),
    path("api/docs/", SpectacularSwaggerView.as_view(url_name="schema"), name="docs"),
    path("api/redoc/", SpectacularRedocView.as_view(url_name="schema"), name="redoc"),
    # Before the admin, because the overview replaces its front page.
    path("admin/", include("console.urls")),
    path("admin/", include("console.charts")),
    path("admin/login/", login),  # replaces the admin's login page, under its name
    path("admin/", admin.site.urls),
]
