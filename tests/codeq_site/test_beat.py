"""Celery beat sends a periodic task only if it may have work."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.beat import PersistentScheduler
from django.db import OperationalError

from codeq_site import beat
from codeq_site.beat import CHECK_SECONDS, IDLE_SECONDS, Scheduler, WorkChecker
from codeq_site.celery import app
from queues.periodic import work_checks
from tests.waiting import until

HOUR = 3600


class Clock:
    """The clock of the scheduler."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(beat, "time", clock)
    return clock


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tasks that a scheduler has sent."""
    names: list[str] = []
    monkeypatch.setattr(PersistentScheduler, "apply_entry", lambda _, entry, **options: names.append(entry.task))
    return names


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    return Scheduler(app, schedule_filename=str(tmp_path / "schedule"), lazy=True)


def offer(scheduler: Scheduler, task: str) -> None:
    entry: Any = SimpleNamespace(task=task)
    scheduler.apply_entry(entry)


def test_beat_uses_this_scheduler() -> None:
    assert app.conf.beat_scheduler == f"{Scheduler.__module__}:{Scheduler.__name__}"


def test_task_without_work_is_sent_at_first_and_then_as_a_sign_of_life(
    scheduler: Scheduler, clock: Clock, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(work_checks, "queues.drain", lambda: False)
    for _ in range(int(2 * IDLE_SECONDS) + 1):
        offer(scheduler, "queues.drain")
        clock.now += 1
    assert sent == ["queues.drain"] * 3


def test_task_with_work_is_sent_whenever_it_is_due(
    scheduler: Scheduler, clock: Clock, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(work_checks, "queues.drain", lambda: True)
    for _ in range(3):
        offer(scheduler, "queues.drain")
        clock.now += 1
    assert sent == ["queues.drain"] * 3


def test_task_without_a_check_is_sent_whenever_it_is_due(scheduler: Scheduler, clock: Clock, sent: list[str]) -> None:
    for _ in range(3):
        offer(scheduler, "queues.cleanup")
    assert sent == ["queues.cleanup"] * 3


@pytest.mark.usefixtures("clock")
def test_scheduler_sleeps_until_the_next_task_is_due(scheduler: Scheduler) -> None:
    assert scheduler.adjust(HOUR) == HOUR


@pytest.mark.parametrize("error", [OperationalError("down"), redis.ConnectionError("refused")])
def test_server_that_is_down_counts_as_work(error: Exception) -> None:
    def check() -> bool:
        raise error

    assert WorkChecker().may_have_work(check)


def test_check_that_hangs_delays_beat_once_and_counts_as_work() -> None:
    checker = WorkChecker()
    is_answering = threading.Event()

    def hang() -> bool:
        return not is_answering.wait(60)

    assert checker.may_have_work(hang)
    started = time.monotonic()
    assert all(checker.may_have_work(lambda: False) for _ in range(100))
    assert time.monotonic() - started < 100 * CHECK_SECONDS / 2
    is_answering.set()
    until(lambda: not checker.may_have_work(lambda: False), 10)
