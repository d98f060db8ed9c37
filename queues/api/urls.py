"""The routes under /v1/codeq. The name of a route is its verb."""

from __future__ import annotations

from django.urls import path

from queues.api import views

urlpatterns = [
    path("tasks", views.TasksView.as_view(), name="tasks"),
    path("tasks/claim", views.ClaimView.as_view(), name="claim"),
    path("tasks/batch", views.TaskBatchView.as_view(), name="task-batch"),
    path("tasks/claim/batch", views.ClaimBatchView.as_view(), name="claim-batch"),
    path("tasks/batch/results", views.ResultBatchView.as_view(), name="result-batch"),
    path("tasks/exchange", views.ExchangeView.as_view(), name="exchange"),
    path("tasks/<str:task_id>/result", views.ResultView.as_view(), name="result"),
    path("tasks/<str:task_id>/heartbeat", views.HeartbeatView.as_view(), name="heartbeat"),
    path("tasks/<str:task_id>/nack", views.NackView.as_view(), name="nack"),
    path("tasks/<str:task_id>/abandon", views.AbandonView.as_view(), name="abandon"),
    path("tasks/<str:task_id>", views.TaskView.as_view(), name="task"),
]
