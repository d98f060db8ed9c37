"""The console's pages, inside `/admin/`, whose own front page the overview replaces."""

from __future__ import annotations

from django.urls import path

from console.bulk import CancelBulk, JobData, JobPage, JobsPage, NewPage, RecallBulk, StartBulk
from console.deadletters import DeleteSelected, Export, GroupsPage, ListPage, ReplaySelected
from console.overview import OverviewData, OverviewPage
from console.page import inside
from console.policy import DeletePolicy, PutPolicy
from console.queue import PauseQueue, QueueCourse, QueueData, QueuePage, ResumeQueue
from console.search import SearchPage
from console.task import Artifact, CancelTask, DeleteTask, ReplayTask, TaskPage

app_name = "console"

urlpatterns = [
    path("", inside(OverviewPage), name="overview"),
    path("console/overview.json", inside(OverviewData), name="overview-data"),
    # A queue is named in the query: a command may be `..`, which no path survives.
    path("console/queue/", inside(QueuePage), name="queue"),
    path("console/queue/live.json", inside(QueueData), name="queue-data"),
    path("console/queue/course.json", inside(QueueCourse), name="queue-course"),
    path("console/queue/pause/", inside(PauseQueue), name="queue-pause"),
    path("console/queue/resume/", inside(ResumeQueue), name="queue-resume"),
    path("console/queue/policy/", inside(PutPolicy), name="queue-policy"),
    path("console/queue/policy/delete/", inside(DeletePolicy), name="queue-policy-delete"),
    path("console/tasks/", inside(SearchPage), name="tasks"),
    path("console/task/", inside(TaskPage), name="task"),
    path("console/task/artifact/", inside(Artifact), name="task-artifact"),
    path("console/task/cancel/", inside(CancelTask), name="task-cancel"),
    path("console/task/replay/", inside(ReplayTask), name="task-replay"),
    path("console/task/delete/", inside(DeleteTask), name="task-delete"),
    path("console/dead/", inside(GroupsPage), name="dead"),
    path("console/dead/list/", inside(ListPage), name="dead-list"),
    path("console/dead/export/", inside(Export), name="dead-export"),
    path("console/dead/replay/", inside(ReplaySelected), name="dead-replay"),
    path("console/dead/delete/", inside(DeleteSelected), name="dead-delete"),
    path("console/bulk/", inside(JobsPage), name="bulk"),
    path("console/bulk/new/", inside(NewPage), name="bulk-new"),
    path("console/bulk/start/", inside(StartBulk), name="bulk-start"),
    path("console/bulk/job/", inside(JobPage), name="bulk-job"),
    path("console/bulk/job/live.json", inside(JobData), name="bulk-job-data"),
    path("console/bulk/job/cancel/", inside(CancelBulk), name="bulk-cancel"),
    path("console/bulk/job/recall/", inside(RecallBulk), name="bulk-recall"),
]
