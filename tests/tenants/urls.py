"""The paths of this room and of the console around it, without the rest of the site."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from tenants import views

urlpatterns = [
    # The sidebar of every page of the admin leads there.
    path("admin/", include("console.urls")),
    path("admin/", include("console.insights")),
    path("admin/", admin.site.urls),
    path(".well-known/jwks.json", views.jwks),
]
