"""Every path of the site. The API's come first: they are looked up most."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("v1/codeq/", include("queues.api.urls")),
    path("admin/", admin.site.urls),
]
