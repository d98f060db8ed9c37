"""A worker that uses codeq_client: two commands, four tasks at once, until Ctrl-C.

export CODEQ=http://127.0.0.1:8080
export WORKER=$(python manage.py token --tenant demo --role worker)
python examples/worker.py
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from codeq_client import Fail, Job, Retry, Worker

if not {"CODEQ", "WORKER"} <= os.environ.keys():
    sys.exit(__doc__)
worker = Worker(os.environ["CODEQ"], os.environ["WORKER"], slots=4)


@worker.on("ADD")
def add(job: Job) -> dict[str, float]:
    numbers = job.payload["numbers"]
    if not all(isinstance(number, int | float) for number in numbers):
        raise Fail("only numbers can be added")  # another attempt would fail as well
    return {"sum": sum(numbers)}


@worker.on("COUNT_DOWN")
async def count_down(job: Job) -> None:
    steps = job.payload["from"]
    for step in range(steps):
        if job.payload.get("failsAt") == step and job.attempt == 1:
            raise Retry("once more, please", delay_seconds=0)
        job.progress(100 * step / steps, note=f"{steps - step} to go")
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    worker.run()
