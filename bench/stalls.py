"""Measure the CPU time of every command that codeQ sends to Redis, at a large backlog.

One client sends one command at a time. The CPU time is that of Valkey's main thread, so other load on the machine has
little effect. It includes reading the command, writing the reply and appending to the log: some 30 µs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import redis
import redis.client
from redis.exceptions import ResponseError

from bench.servers import DAY_MS, PAYLOAD, start_servers
from codeq_site.devserver.embedded import DURABLE

MEDIAN_US, MAX_US = 2_000, 10_000
BATCH = 100
HOUR_MS = 3_600_000
QUEUES = 10_000


class CommandTimes:
    """The CPU times of commands, by their names and the label that was set when they were sent."""

    def __init__(self, pid: int) -> None:
        self._directory = Path(f"/proc/{pid}/task/{pid}")
        self._names: dict[str, str] = {}
        self._label: str | None = None
        self.times_us: dict[tuple[str, str], list[float]] = defaultdict(list)

    def load_scripts(self) -> None:
        from core.redis.connections import client
        from queues.engine import script_loader

        for script in script_loader.load_all():
            client().script_load(script.source)
            self._names[script.sha] = script.name

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Record the commands in the block under this label. Other commands are not recorded."""
        self._label = label
        try:
            yield
        finally:
            self._label = None

    def send(self, send: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._label is None:
            return send(*arguments, **options)
        before = self._read_us()
        try:
            return send(*arguments, **options)
        finally:
            self.times_us[self._label, self._name(arguments)].append(self._read_us() - before)

    def _name(self, arguments: tuple[Any, ...]) -> str:
        first = str(arguments[0])
        return self._names[arguments[1]] if first.startswith("EVAL") else first

    def _read_us(self) -> float:
        """Return the CPU time of the thread once it has nothing left to do."""
        while (self._directory / "stat").read_text().rpartition(")")[2].split()[0] == "R":
            pass
        return int((self._directory / "schedstat").read_text().split()[0]) / 1000

    def print_table(self) -> None:
        header = f"{'operation':<44} {'command':<26} {'calls':>7} {'median':>8} {'99.9 %':>8} {'max':>8}"
        print(f"{header}   CPU of Valkey in µs")
        for (label, name), times in self.times_us.items():
            times.sort()
            median, high, largest = times[len(times) // 2], times[int(len(times) * 0.999)], times[-1]
            mark = "" if median <= MEDIAN_US and largest < MAX_US else "MISSED"
            print(f"{label:<44} {name:<26} {len(times):>7,} {median:>8,.0f} {high:>8,.0f} {largest:>8,.0f}   {mark}")


@contextmanager
def measured_client(times: CommandTimes) -> Iterator[None]:
    """Record the CPU time of every command of redis-py.

    The commands of a pipeline are sent one by one.
    """
    send = redis.Redis.execute_command

    def execute_command(client: redis.Redis, *arguments: Any, **options: Any) -> Any:
        return times.send(lambda *args, **kwargs: send(client, *args, **kwargs), arguments, options)

    def execute_pipeline(pipeline: redis.client.Pipeline, raise_on_error: bool = True) -> list[Any]:
        client = redis.Redis(connection_pool=pipeline.connection_pool)
        replies: list[Any] = []
        for arguments, options in pipeline.command_stack:
            try:
                replies.append(execute_command(client, *arguments, **options))
            except ResponseError as error:
                if raise_on_error:
                    raise
                replies.append(error)
        pipeline.reset()
        return replies

    with (
        mock.patch.object(redis.Redis, "execute_command", execute_command),
        mock.patch.object(redis.client.Pipeline, "execute", execute_pipeline),
    ):
        yield


def until(seconds: float) -> Callable[[], bool]:
    """Return a function that is True for this time: periodic tasks ask it whether to continue."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() < deadline


class Clock:
    """The clock of the engine's scripts. It starts two days ago, so that it can be set forward."""

    def __init__(self) -> None:
        self.ms = int(time.time() * 1000) - 2 * DAY_MS

    def __call__(self) -> int:
        return self.ms


class Load:
    """A tenant with a large backlog, and another one with many queues."""

    def __init__(self, scale: float) -> None:
        from queues.current_engine import engine
        from tenants.models import Tenant

        self.engine, self.clock = engine(), Clock()
        self.engine.clock = self.clock
        self.tid = Tenant.objects.create(slug="stalls").tid
        self.many_tid = Tenant.objects.create(slug="stalls-queues").tid
        self.count = int(100_000 * scale)
        self.queues = [f"queue-{number}" for number in range(int(QUEUES * scale))]

    def enqueue(self, command: str, count: int = BATCH, tid: str = "", **fields: Any) -> list[str]:
        from queues.domain import NewTask
        from queues.engine import producer_commands

        new = [NewTask(command=command, payload=PAYLOAD, **fields)] * count
        call = producer_commands.enqueue(self.engine, tid or self.tid, "stalls", new, retention_ms=DAY_MS)
        return [item.task.id for item in call.run_sync() if not isinstance(item, Exception)]

    def claim(self, *commands: str, limit: int = BATCH, lease_ms: int = DAY_MS) -> list[Any]:
        from queues.engine import worker_commands

        call = worker_commands.claim(self.engine, self.tid, list(commands), "w", lease_ms=lease_ms, limit=limit)
        return call.run_sync().tasks

    def submit(self, tasks: Sequence[Any], *, retention_ms: int = DAY_MS) -> None:
        from queues.domain import NewResult, TaskStatus
        from queues.engine import worker_commands

        results = [
            NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b'{"ok":true}', lease_token=task.lease_token)
            for task in tasks
        ]
        worker_commands.submit(self.engine, self.tid, "w", results, retention_ms=retention_ms).run_sync()

    def create(self) -> None:
        """Create the backlog: ready, delayed and leased tasks, ended tasks with events, and queues."""
        for _ in range(self.count // 1000):
            self.enqueue("ready", 1000)
            self.enqueue("delayed", 1000, delay_ms=HOUR_MS)
            self.enqueue("leased", 1000, max_attempts=1)
            self.claim("leased", limit=1000, lease_ms=HOUR_MS)
        for _ in range(self.count // 4000):
            self.enqueue("ended", 1000)
            self.submit(self.claim("ended", limit=1000), retention_ms=1)
        self.clock.ms += 1000  # the large queues are due first
        for queue in self.queues:
            self.enqueue(queue, 1, self.many_tid, delay_ms=HOUR_MS)

    def copy_events(self, count: int) -> None:
        """Add copies of the first entries to the events stream."""
        from core.redis.connections import client
        from queues.engine import keys

        copy = (
            "local entries = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1]) "
            "for _, entry in ipairs(entries) do redis.call('XADD', KEYS[1], '*', unpack(entry[2])) end"
        )
        for _ in range(count // 5000):
            client().eval(copy, 1, keys.of_partition(0).events, 5000)


def measure_stalls(scale: float) -> None:
    with start_servers(
        DURABLE | {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}, CODEQ_PARTITIONS="1"
    ) as servers:
        times = CommandTimes(servers.valkey.pid)
        with measured_client(times):
            load = Load(scale)
            load.create()
            times.load_scripts()
            _measure_verbs(load, times)
            load.clock.ms += 2 * HOUR_MS
            _measure_due_work(load, times)
            _measure_dead_letters(load, times)
            load.copy_events(int(300_000 * scale))
            _measure_periodic_tasks(load, times)
        times.print_table()


def _measure_verbs(load: Load, times: CommandTimes) -> None:
    from queues.engine import admin_commands, producer_commands, queries, worker_commands

    engine, tid = load.engine, load.tid
    for number in range(50):
        with times.labelled("enqueue 100"):
            load.enqueue("ready")
        with times.labelled("enqueue 100 delayed"):
            load.enqueue("delayed", delay_ms=10 * HOUR_MS)
        with times.labelled("enqueue 100 with one idempotency key"):
            load.enqueue("ready", idempotency_key=f"key-{number}")
        with times.labelled("enqueue 100 that exist"):
            load.enqueue("ready", idempotency_key=f"key-{number}")
        with times.labelled("claim 100"):
            tasks = load.claim("ready")
        with times.labelled("submit 100"):
            load.submit(tasks)
        with times.labelled("claim from 100 queues"):
            load.claim(*load.queues[:99], "ready", limit=1)
    for _ in range(20):
        first, second, third, *_rest = load.claim("ready", limit=10)
        with times.labelled("single commands of workers"):
            worker_commands.heartbeat(
                engine, tid, first.id, "w", extend_ms=DAY_MS, token=first.lease_token, progress="half"
            ).run_sync()
            worker_commands.nack(
                engine, tid, first.id, "w", token=first.lease_token, delay_ms=None, reason="no",
                dead_retention_ms=DAY_MS,
            ).run_sync()  # fmt: skip
            worker_commands.abandon(
                engine, tid, second.id, "w", token=second.lease_token, dead_retention_ms=DAY_MS
            ).run_sync()
        with times.labelled("single commands of producers and pages"):
            producer_commands.cancel(engine, tid, third.id, retention_ms=DAY_MS).run_sync()
            [task_id] = load.enqueue("ready", 1)
            queries.task(engine, tid, task_id).run_sync()
            queries.find_tenant(engine, task_id).run_sync()
            queries.queue_position(engine, tid, task_id).run_sync()
            queries.peek(engine, tid, "ready", 25).run_sync()
            queries.stats(engine, tid, ["ready", "delayed", "leased"]).run_sync()
            for index in ("ready:0", "delayed", "inprog"):
                queries.scan(engine, tid, "leased" if index == "inprog" else index.split(":")[0], index).run_sync()
            admin_commands.pause(engine, tid, "ready").run_sync()
            admin_commands.resume(engine, tid, "ready").run_sync()
    for _ in range(10):
        with times.labelled(f"list {len(load.queues):,} queues"):
            queries.list_queues(engine, load.many_tid).run_sync()


def _measure_due_work(load: Load, times: CommandTimes) -> None:
    from queues import maintenance

    for _ in range(50):
        with times.labelled("claim 100 with due tasks"):
            load.claim("delayed")
        with times.labelled("claim 100 with expired leases"):
            load.claim("leased")
    with times.labelled("periodic: repair"):
        may_continue = until(20)
        while any(maintenance.repair(may_continue)):
            pass


def _measure_dead_letters(load: Load, times: CommandTimes) -> None:
    from core.redis.connections import client
    from queues import services
    from queues.deadletters.bulk_runner import BATCH_SIZE
    from queues.engine import keys
    from tenants.cache import tenant_cache

    tenant = tenant_cache.find_by_tid(load.tid)
    assert tenant
    root = load.engine.root(load.tid)
    dead = keys.of_queue(root, load.tid, "leased").dlq
    for number in range(10):
        ids = [task_id.decode() for task_id in client().zrange(dead, 0, BATCH_SIZE - 1)]
        job = f"job-{number}"
        with times.labelled(f"bulk jobs, {BATCH_SIZE} tasks at once"):
            services.replay_for(tenant, ids, job).run_sync()
            services.undo_replay(tenant, ids, job).run_sync()
            services.purge_dead(tenant, ids).run_sync()
        ids = [task_id.decode() for task_id in client().zrange(dead, 0, BATCH - 1)]
        with times.labelled("replay 100"):
            services.replay(tenant, ids).run_sync()


def _measure_periodic_tasks(load: Load, times: CommandTimes) -> None:
    from queues import maintenance, metrics, periodic_tasks, policies
    from queues.audit import stream
    from queues.stats import sampler
    from webhooks import nonempty_queues

    with times.labelled("periodic: survey of the streams"):
        for _ in range(10):
            stream.survey()
            stream.drained_until_ms(0)
    with times.labelled("periodic: drain"):
        periodic_tasks.run_drain(until(10))
    with times.labelled("trim after an outage of the drain"):
        _acknowledge_all_but_first()
    load.clock.ms = int(time.time() * 1000)
    with times.labelled("periodic: cleanup"):
        maintenance.cleanup(until(10))
    with times.labelled("periodic: sample"):
        sampler.sample(until(10))
    with times.labelled("periodic: notifications"):
        while nonempty_queues.take():
            pass
    with times.labelled("periodic: policies"):
        policies.sync(until(10))
    with times.labelled("scrape of metrics"):
        list(metrics.depths(time.monotonic() + 10))


def _acknowledge_all_but_first() -> None:
    """Acknowledge all entries in parts, the first one last, so that all are trimmed at once."""
    from queues.audit import stream

    first: list[Any] = []
    while entries := stream.read({0: stream.NEW}, 10_000):
        rest = entries if first else entries[1:]
        first = first or entries[:1]
        stream.acknowledge(rest)
    stream.acknowledge(first)
