"""The route of the marts under /v1/codeq."""

from __future__ import annotations

from django.urls import path

from pipeline.api.views import InsightsView

urlpatterns = [path("insights/<str:mart>", InsightsView.as_view(), name="insights")]
