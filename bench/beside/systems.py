"""The systems that are compared, one row of the table each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.beside import environments
from bench.beside.environments import DRIVERS
from bench.beside.stores import CodeqStore, PostgreSQLStore, Store, ValkeyStore

ENQUEUE, ENQUEUE_MANY, WORK, LATENCY = "enqueue", "enqueue_many", "work", "latency"
OPERATIONS = (LATENCY, ENQUEUE, ENQUEUE_MANY, WORK)
WITHOUT_BATCHES = (LATENCY, ENQUEUE, WORK)


@dataclass(frozen=True)
class System:
    """A row of the table.

    `install` returns the path to run: a Python, or a program for Node. `waiting` names the place of the tasks that have
    not ended, for `Store.count`. `workers` is the number of worker processes that the benchmark starts; some systems
    start more.
    """

    key: str
    name: str
    description: str
    install: Callable[[Path], Path]
    driver: str
    store: Callable[[Path], Store]
    waiting: tuple[str, ...]
    workers: int = 1
    operations: tuple[str, ...] = OPERATIONS
    work_arguments: tuple[str, ...] = ()

    @property
    def is_codeq(self) -> bool:
        return self.install is environments.project

    def argv(self, installed: Path, mode: str) -> list[str]:
        """Return the command line of the driver in a mode, `produce` or `work`."""
        program = (
            ["node", str(installed)] if self.driver.endswith(".mjs") else [str(installed), str(DRIVERS / self.driver)]
        )
        return [*program, mode, *(self.work_arguments if mode == "work" else ())]


def _python(name: str) -> Callable[[Path], Path]:
    return partial(environments.python_environment, name)


SYSTEMS = (
    System(
        "codeq-http",
        "codeQ, HTTP",
        "HTTP service, called without a client library: one connection enqueues; a worker process with eight "
        "connections calls `/tasks/exchange`. Results, audit and metrics on",
        environments.project,
        "codeq_http.py",
        CodeqStore,
        ("bench",),
    ),
    System(
        "codeq-client",
        "codeQ, `codeq_client`",
        "the same service through the Python client: one worker process with 16 slots",
        environments.project,
        "codeq_library.py",
        CodeqStore,
        ("bench",),
    ),
    System(
        "celery",
        "Celery",
        "library on Valkey: one worker with two processes, `acks_late`, `reject_on_worker_lost`, results in Valkey",
        _python("celery"),
        "celery_app.py",
        ValkeyStore,
        ("celery", "unacked"),
        operations=WITHOUT_BATCHES,
    ),
    System(
        "dramatiq",
        "Dramatiq",
        "library on Valkey: two processes with eight threads each, results in Valkey",
        _python("dramatiq"),
        "dramatiq_app.py",
        ValkeyStore,
        ("dramatiq:default.msgs",),
        operations=WITHOUT_BATCHES,
    ),
    System(
        "rq",
        "RQ",
        "library on Valkey: two workers that fork for every job (the default), results in Valkey",
        _python("rq"),
        "rq_app.py",
        ValkeyStore,
        ("rq:queue:bench", "rq:wip:bench"),
        workers=2,
    ),
    System(
        "rq-simple",
        "RQ, `SimpleWorker`",
        "the same, but each worker runs the jobs in its own process",
        _python("rq"),
        "rq_app.py",
        ValkeyStore,
        ("rq:queue:bench", "rq:wip:bench"),
        workers=2,
        work_arguments=("simple",),
        operations=(LATENCY, WORK),
    ),
    System(
        "arq",
        "arq",
        "asyncio library on Valkey: two processes with 50 jobs each, results in Valkey, `poll_delay` 10 ms (with the "
        "default of 500 ms the latency is a quarter of a second)",
        _python("arq"),
        "arq_app.py",
        ValkeyStore,
        ("arq:queue",),
        workers=2,
        operations=WITHOUT_BATCHES,
    ),
    System(
        "procrastinate",
        "Procrastinate",
        "asyncio library on PostgreSQL: two processes with 25 jobs each, `LISTEN`/`NOTIFY`, no results",
        _python("procrastinate"),
        "procrastinate_app.py",
        PostgreSQLStore,
        ("SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",),
        workers=2,
    ),
    System(
        "bullmq",
        "BullMQ",
        "Node.js library on Valkey: one process with 100 jobs at once, results in Valkey",
        partial(environments.node_environment, "bullmq"),
        "bullmq.mjs",
        ValkeyStore,
        ("bull:bench:wait", "bull:bench:active"),
    ),
)


def select_systems(keys: str | None) -> list[System]:
    """Return the systems with these keys, separated by commas; by default all."""
    if not keys:
        return list(SYSTEMS)
    by_key = {system.key: system for system in SYSTEMS}
    try:
        return [by_key[key] for key in keys.split(",")]
    except KeyError as error:
        sys.exit(f"Unknown system {error}. The systems are: {', '.join(by_key)}.")
