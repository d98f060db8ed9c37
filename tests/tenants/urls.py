"""The URLs of tenants and of the console, without the rest of the site."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from tenants import views

urlpatterns = [
    # The sidebar of every admin page links to these.
    path("admin/", include("console.urls")),
    path("admin/", include("console.charts")),
    path("admin/", admin.site.urls),
    path(".well-known/jwks.json", views.jwks),
]
