"""The console's pages, inside `/admin/`, whose own front page the overview replaces."""

from __future__ import annotations

from django.urls import path

from queues.console.overview import OverviewData, OverviewPage
from queues.console.page import inside

app_name = "console"

urlpatterns = [
    path("", inside(OverviewPage), name="overview"),
    path("console/overview.json", inside(OverviewData), name="overview-data"),
]
