"""URLs of console pages, for the tables of the admin."""

from __future__ import annotations

from urllib.parse import urlencode

from django.urls import reverse


def queue_url(tid: str, command: str) -> str:
    return f"{reverse('console:queue')}?{urlencode({'tenant': tid, 'command': command})}"


def task_url(tid: str, task_id: object) -> str:
    return f"{reverse('console:task')}?tenant={tid}&id={task_id}"
