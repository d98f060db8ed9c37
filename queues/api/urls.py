"""The routes under /v1/codeq."""

from __future__ import annotations

from django.urls import path

from queues.api import openapi  # noqa: F401 - registers examples and rules
from queues.api.views import deadletters, leases, queues, results, tasks, topics

urlpatterns = [
    path("tasks", tasks.TasksView.as_view(), name="tasks"),
    path("tasks/claim", leases.ClaimView.as_view(), name="claim"),
    path("tasks/batch", tasks.TaskBatchView.as_view(), name="task-batch"),
    path("tasks/claim/batch", leases.ClaimBatchView.as_view(), name="claim-batch"),
    path("tasks/batch/results", results.ResultBatchView.as_view(), name="result-batch"),
    path("tasks/exchange", results.ExchangeView.as_view(), name="exchange"),
    path("tasks/<str:task_id>/result", results.ResultView.as_view(), name="result"),
    path("tasks/<str:task_id>/artifacts/<str:artifact_id>", results.ArtifactView.as_view(), name="artifact"),
    path("tasks/<str:task_id>/heartbeat", leases.HeartbeatView.as_view(), name="heartbeat"),
    path("tasks/<str:task_id>/nack", leases.NackView.as_view(), name="nack"),
    path("tasks/<str:task_id>/abandon", leases.AbandonView.as_view(), name="abandon"),
    path("tasks/<str:task_id>", tasks.TaskView.as_view(), name="task"),
    path("admin/queues", queues.QueuesView.as_view(), name="queues"),
    path("admin/queues/<str:command>", queues.QueueView.as_view(), name="queue"),
    path("admin/queues/<str:command>/pause", queues.PauseView.as_view(), name="pause"),
    path("admin/queues/<str:command>/resume", queues.ResumeView.as_view(), name="resume"),
    path("admin/dlq/<str:command>", deadletters.DeadLettersView.as_view(), name="dead-letters"),
    path("admin/dlq/<str:command>/replay", deadletters.ReplayView.as_view(), name="replay"),
    path("admin/bulk/<str:job_id>", deadletters.BulkView.as_view(), name="bulk"),
    path("admin/topics", topics.TopicsView.as_view(), name="topics"),
    path("admin/topics/<str:name>", topics.TopicView.as_view(), name="topic"),
    path("admin/tasks/cleanup", queues.CleanupView.as_view(), name="cleanup"),
]
