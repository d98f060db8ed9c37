"""The routes under /v1/codeq. The name of a route is its verb."""

from __future__ import annotations

from django.urls import path

from queues.api import admin_views, views

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
    path("admin/queues", admin_views.QueuesView.as_view(), name="queues"),
    path("admin/queues/<str:command>", admin_views.QueueView.as_view(), name="queue"),
    path("admin/queues/<str:command>/pause", admin_views.PauseView.as_view(), name="pause"),
    path("admin/queues/<str:command>/resume", admin_views.ResumeView.as_view(), name="resume"),
    path("admin/tasks/cleanup", admin_views.CleanupView.as_view(), name="cleanup"),
]
