"""Measure the bytes and commands that the three Bloom filters save.

    python -m bench.filters

Valkey counts these itself (`INFO stats`), so the figures do not depend on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import redis

from bench.servers import print_row, start_bench
from queues.engine import maintenance_commands


def main() -> None:
    with start_bench() as bench:
        # The settings contain the server's URL, so they must be read after it is started.
        os.environ["REDIS_URL"] = f"unix://{bench.client.connection_pool.connection_kwargs['path']}?db=0"
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
        import django

        django.setup()
        measure(bench.client)


def measure(client: redis.Redis) -> None:
    from core import errors
    from queues import filters, services
    from queues.current_engine import engine
    from queues.domain import NewResult, NewTask, TaskStatus
    from tenants.domain import TenantSnapshot

    tenant = TenantSnapshot(tid="bench001", slug="bench")
    payload = '"' + "x" * 4096 + '"'
    on, off = filters.Filters(), filters.Filters(is_enabled=False)

    def measure_cost(selected: filters.Filters, work: Callable[[], object]) -> tuple[int, int, object]:
        """Return the bytes and the commands that Redis received, and the result of `work`."""
        services.filters = lambda: selected  # type: ignore[assignment]
        client.script_flush()
        before = client.info("stats")
        result = work()
        after = client.info("stats")
        # The difference includes one of the two INFO calls: about 20 bytes.
        return (
            after["total_net_input_bytes"] - before["total_net_input_bytes"],
            after["total_commands_processed"] - before["total_commands_processed"] - 1,
            result,
        )

    def enqueue(first: int, count: int) -> list[str]:
        ids = []
        for n in range(first, first + count):
            new = NewTask(command="send", payload=payload, idempotency_key=f"key-{n}")
            item = services.enqueue(tenant, [new]).run_sync()[0]
            ids.append("refused" if isinstance(item, Exception) else item.task.id)
        return ids

    client.flushall()
    services.filters = lambda: on  # type: ignore[assignment]
    task_ids = enqueue(0, 1000)
    bytes_on, _, result_on = measure_cost(on, lambda: enqueue(0, 1000))
    bytes_off, _, result_off = measure_cost(off, lambda: enqueue(0, 1000))
    assert result_on == result_off == task_ids
    print_row("1,000 duplicates of 4 KB: sent, filter on", f"{bytes_on / 1e6:.2f} MB")
    print_row("1,000 duplicates of 4 KB: sent, filter off", f"{bytes_off / 1e6:.2f} MB, {bytes_off / bytes_on:.1f}x")
    bytes_on, _, _ = measure_cost(on, lambda: enqueue(10_000, 1000))
    bytes_off, _, _ = measure_cost(off, lambda: enqueue(20_000, 1000))
    print_row("1,000 new keys: sent with the filters, relative to without", f"{bytes_on / bytes_off:.3f}x")

    def send_heartbeats(ids: list[str]) -> list[str]:
        error_codes = []
        for task_id in ids * 5:
            try:
                services.heartbeat(tenant, task_id, "w").run_sync()
            except errors.CodeqError as error:
                error_codes.append(error.code)
        return error_codes

    for task in services.claim(tenant, ["send"], "w", count=1000).run_sync().tasks:
        services.submit(tenant, "w", [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1")]).run_sync()
    services.filters = lambda: on  # type: ignore[assignment]
    services.purge(tenant, task_ids).run_sync()
    _, calls_on, result_on = measure_cost(on, lambda: send_heartbeats(task_ids))
    _, calls_off, result_off = measure_cost(off, lambda: send_heartbeats(task_ids))
    assert result_on == result_off
    print_row("5,000 heartbeats of deleted tasks: commands, on / off", f"{calls_on} / {calls_off}")

    now_ms = maintenance_commands.expired(engine(), tenant.tid).run_sync()[0]
    services.cleanup(tenant.tid).run_sync()
    # Measure a cleanup of ids that the cleanup of another process has removed already.
    root = engine().root(tenant.tid)
    client.zadd(f"{root}expiry:{tenant.tid}", dict.fromkeys(task_ids, now_ms - 1))
    bytes_on, _, _ = measure_cost(on, lambda: services.cleanup(tenant.tid).run_sync())
    bytes_off, _, _ = measure_cost(off, lambda: services.cleanup(tenant.tid).run_sync())
    print_row("cleanup over 1,000 ids removed already: sent, on / off", f"{bytes_on} / {bytes_off} bytes")


if __name__ == "__main__":
    main()
