"""Celery: late acknowledgement, so that a task survives its worker, and results in Redis."""

from __future__ import annotations

from typing import Any

import driver
from celery import Celery

app = Celery("celery_app", broker=driver.STORE, backend=driver.STORE)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=True,
)


@app.task(name="handle")
def handle(payload: dict[str, Any]) -> dict[str, bool]:
    return driver.handle(payload)


if __name__ == "__main__":
    if driver.is_worker():
        app.worker_main(["worker", "--concurrency=2", "--loglevel=WARNING", "--without-gossip", "--without-mingle"])
    else:
        driver.serve(driver.answer_with(handle.delay, None), ["celery", "kombu", "redis"])
