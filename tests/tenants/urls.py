"""The paths of this room, without the rest of the site."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from tenants import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path(".well-known/jwks.json", views.jwks),
]
