"""Scripts of pages, operators and periodic tasks do little work each, at any backlog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis.client

from core.redis.connections import client
from core.redis.script_call import ScriptCommand
from queues import maintenance, periodic_tasks, selectors, services
from queues.current_engine import engine
from queues.deadletters.bulk_runner import BATCH_SIZE
from queues.domain import NewResult, NewTask, TaskStatus
from queues.engine import queries
from queues.models import Attempt
from queues.stats import sampler
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from tests.factories import TenantFactory
from tests.fixtures.queues import Clock

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]

COUNT = 1200
# The most commands that one script runs in Redis. A command takes about two microseconds.
MAX_COMMANDS = 1000


@pytest.fixture(autouse=True)
def _tenant_row(tenant: TenantSnapshot) -> Iterator[None]:
    TenantFactory(tid=tenant.tid, slug=tenant.slug)
    yield
    tenant_cache.stop()


@pytest.fixture
def commands_by_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The numbers of commands that each script has run in Redis, by the script's name."""
    counts: dict[str, list[int]] = {}
    run = engine().runner.run_sync

    def count_commands() -> int:
        statistics = client().info("commandstats")
        return sum(int(values["calls"]) for name, values in statistics.items() if name != "cmdstat_info")

    def run_sync(commands: Sequence[ScriptCommand]) -> list[Any]:
        replies = []
        for command in commands:
            before = count_commands()
            replies += run([command])
            counts.setdefault(command[0].name, []).append(count_commands() - before)  # type: ignore[attr-defined]
        return replies

    monkeypatch.setattr(engine().runner, "run_sync", run_sync)
    return counts


def enqueue(tenant: TenantSnapshot, count: int = COUNT, **fields: Any) -> list[str]:
    new = [NewTask(**{"command": "send", "payload": "1", **fields})] * count
    return [item.task.id for item in services.enqueue(tenant, new).run_sync()]  # type: ignore[union-attr]


def make_dead_letters(tenant: TenantSnapshot, clock: Clock, count: int) -> list[str]:
    ids = enqueue(tenant, count, max_attempts=1)
    assert len(services.claim(tenant, ["send"], "w", lease_seconds=1, count=count).run_sync().tasks) == count
    clock.advance(2)
    assert maintenance.repair(lambda: True) == (0, count)
    return ids


def complete(tenant: TenantSnapshot, count: int = COUNT) -> None:
    enqueue(tenant, count)
    tasks = services.claim(tenant, ["send"], "w", count=count).run_sync().tasks
    services.submit(
        tenant, "w", [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1") for task in tasks]
    ).run_sync()


def is_bounded(commands_by_script: dict[str, list[int]], *names: str) -> bool:
    return all(0 < max(commands_by_script[name]) <= MAX_COMMANDS for name in names)


def test_repair_makes_a_large_backlog_ready_in_small_scripts(
    tenant: TenantSnapshot, clock: Clock, commands_by_script: dict[str, list[int]]
) -> None:
    enqueue(tenant, delay_ms=1000)
    clock.advance(2)
    assert maintenance.repair(lambda: True) == (COUNT, 0)
    assert is_bounded(commands_by_script, "promote", "due_queues")


def test_repair_ends_a_large_number_of_expired_leases_in_small_scripts(
    tenant: TenantSnapshot, clock: Clock, commands_by_script: dict[str, list[int]]
) -> None:
    make_dead_letters(tenant, clock, COUNT)
    assert is_bounded(commands_by_script, "reap")


def test_operations_on_many_dead_letters_are_small_scripts(
    tenant: TenantSnapshot, clock: Clock, commands_by_script: dict[str, list[int]]
) -> None:
    ids = make_dead_letters(tenant, clock, 1000)
    bulk = ids[:BATCH_SIZE]
    assert services.replay_for(tenant, bulk, "job").run_sync() == [None] * BATCH_SIZE
    assert services.undo_replay(tenant, bulk, "job").run_sync() == [None] * BATCH_SIZE
    assert [task.id for task in services.replay(tenant, ids).run_sync()] == ids  # type: ignore[union-attr]
    assert is_bounded(commands_by_script, "replay", "undo_replay")


def test_a_thousand_dead_letters_are_deleted_in_small_scripts(
    tenant: TenantSnapshot, clock: Clock, commands_by_script: dict[str, list[int]]
) -> None:
    ids = make_dead_letters(tenant, clock, 1000)
    assert services.purge_dead(tenant, ids).run_sync() == [None] * 1000
    assert is_bounded(commands_by_script, "purge")


@pytest.mark.spec("BEA-1", "The drain reads and acknowledges a long stream in small commands")
def test_drain_and_cleanup_of_a_large_backlog_are_small_commands(
    tenant: TenantSnapshot, clock: Clock, commands_by_script: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(tenant)
    sizes: dict[str, list[int]] = {}
    execute = redis.client.Pipeline.execute

    def record_sizes(pipeline: redis.client.Pipeline, *, raise_on_error: bool = True) -> list[Any]:
        for arguments, _ in pipeline.command_stack:
            sizes.setdefault(arguments[0], []).append(len(arguments))
            if arguments[0] == "XREADGROUP":
                sizes.setdefault("COUNT", []).append(int(arguments[arguments.index(b"COUNT") + 1]))
        return execute(pipeline, raise_on_error=raise_on_error)

    monkeypatch.setattr(redis.client.Pipeline, "execute", record_sizes)
    assert periodic_tasks.run_drain(lambda: True) == (COUNT, 0)
    assert Attempt.objects.count() == COUNT
    assert max(sizes["COUNT"]) <= 250
    assert max(sizes["XACK"]) <= 253
    clock.advance(40 * 86_400)
    assert services.cleanup(tenant.tid).run_sync() == 1000
    assert is_bounded(commands_by_script, "read_blobs", "expired", "purge")


def test_statistics_of_many_queues_are_small_scripts(
    tenant: TenantSnapshot, commands_by_script: dict[str, list[int]]
) -> None:
    names = sorted(f"queue-{number}" for number in range(COUNT))
    services.enqueue(tenant, [NewTask(command=name, payload="1") for name in names]).run_sync()
    commands_by_script.clear()
    assert [queue.command for queue in selectors.queues(tenant).run_sync()] == names
    assert sampler.sample(lambda: True)[0] == COUNT
    assert is_bounded(commands_by_script, "stats", "list_queues")
    assert len(commands_by_script["list_queues"]) > 2  # not all names at once


@pytest.mark.parametrize("count", [1, 25, 100])
def test_peek_reads_as_many_tasks_as_it_returns(
    tenant: TenantSnapshot, commands_by_script: dict[str, list[int]], count: int
) -> None:
    for priority in range(10):
        enqueue(tenant, 120, priority=priority)
    assert len(queries.peek(engine(), tenant.tid, "send", count).run_sync().ready) == count
    assert max(commands_by_script["peek"]) <= count + 20
