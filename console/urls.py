"""URLs of the console's pages. The overview replaces the admin's index page."""

from __future__ import annotations

from django.urls import path

from console.bulk import (
    CancelBulkJob,
    JobData,
    JobListPage,
    JobPage,
    NewJobPage,
    StartBulkJob,
    UndoReplay,
)
from console.deadletters import (
    DeadLetterListPage,
    DeleteSelected,
    ExportDeadLetters,
    FailureGroupsPage,
    ReplaySelected,
)
from console.overview import OverviewData, OverviewPage
from console.page import as_admin_view
from console.policy import DeletePolicy, SavePolicy
from console.queue import PauseQueue, QueueChartData, QueueData, QueuePage, ResumeQueue
from console.search import SearchPage
from console.task import ArtifactDownload, CancelTask, DeleteTask, ReplayTask, TaskPage

app_name = "console"

urlpatterns = [
    path("", as_admin_view(OverviewPage), name="overview"),
    path("console/overview.json", as_admin_view(OverviewData), name="overview-data"),
    # The queue is in the query string, not in the path: it may be named `..`, which a browser removes from a path.
    path("console/queue/", as_admin_view(QueuePage), name="queue"),
    path("console/queue/live.json", as_admin_view(QueueData), name="queue-data"),
    path("console/queue/charts.json", as_admin_view(QueueChartData), name="queue-charts"),
    path("console/queue/pause/", as_admin_view(PauseQueue), name="queue-pause"),
    path("console/queue/resume/", as_admin_view(ResumeQueue), name="queue-resume"),
    path("console/queue/policy/", as_admin_view(SavePolicy), name="queue-policy"),
    path("console/queue/policy/delete/", as_admin_view(DeletePolicy), name="queue-policy-delete"),
    path("console/tasks/", as_admin_view(SearchPage), name="tasks"),
    path("console/task/", as_admin_view(TaskPage), name="task"),
    path("console/task/artifact/", as_admin_view(ArtifactDownload), name="task-artifact"),
    path("console/task/cancel/", as_admin_view(CancelTask), name="task-cancel"),
    path("console/task/replay/", as_admin_view(ReplayTask), name="task-replay"),
    path("console/task/delete/", as_admin_view(DeleteTask), name="task-delete"),
    path("console/dead/", as_admin_view(FailureGroupsPage), name="dead"),
    path("console/dead/list/", as_admin_view(DeadLetterListPage), name="dead-list"),
    path("console/dead/export/", as_admin_view(ExportDeadLetters), name="dead-export"),
    path("console/dead/replay/", as_admin_view(ReplaySelected), name="dead-replay"),
    path("console/dead/delete/", as_admin_view(DeleteSelected), name="dead-delete"),
    path("console/bulk/", as_admin_view(JobListPage), name="bulk"),
    path("console/bulk/new/", as_admin_view(NewJobPage), name="bulk-new"),
    path("console/bulk/start/", as_admin_view(StartBulkJob), name="bulk-start"),
    path("console/bulk/job/", as_admin_view(JobPage), name="bulk-job"),
    path("console/bulk/job/live.json", as_admin_view(JobData), name="bulk-job-data"),
    path("console/bulk/job/cancel/", as_admin_view(CancelBulkJob), name="bulk-cancel"),
    path("console/bulk/job/recall/", as_admin_view(UndoReplay), name="bulk-recall"),
]
