"""What the three Bloom filters save, on against off: bytes to Redis, round trips, ids sent.

    python -m bench.filters

Counted by Valkey itself (`INFO stats`), so the figures do not depend on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import redis

from bench.engine import row, world
from queues.engine import maintenance_commands


def main() -> None:
    with world() as w:
        # The settings name the server, so they are read after it runs.
        os.environ["REDIS_URL"] = f"unix://{w.client.connection_pool.connection_kwargs['path']}?db=0"
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
        import django

        django.setup()
        measure(w.client)


def measure(client: redis.Redis) -> None:
    from core import errors
    from queues import filters, services
    from queues.current_engine import engine
    from queues.domain import NewResult, NewTask, Status
    from tenants.tenant import Tenant

    tenant = Tenant(tid="bench001", slug="bench")
    payload = '"' + "x" * 4096 + '"'
    on, off = filters.Filters(), filters.NoFilters()

    def spent(chosen: filters.Filters, work: Callable[[], object]) -> tuple[int, int, object]:
        services.filters = lambda: chosen  # type: ignore[assignment]
        client.script_flush()
        work_before = client.info("stats")
        answer = work()
        after = client.info("stats")
        # The two INFO calls themselves are in the difference: one of them, 20-odd bytes.
        return (
            after["total_net_input_bytes"] - work_before["total_net_input_bytes"],
            after["total_commands_processed"] - work_before["total_commands_processed"] - 1,
            answer,
        )

    def enqueue(first: int, count: int) -> list[str]:
        found = []
        for n in range(first, first + count):
            new = NewTask(command="send", payload=payload, idempotency_key=f"key-{n}")
            item = services.enqueue(tenant, [new]).run_sync()[0]
            found.append("refused" if isinstance(item, Exception) else item.task.id)
        return found

    client.flushall()
    services.filters = lambda: on  # type: ignore[assignment]
    made = enqueue(0, 1000)
    with_it, _, answers = spent(on, lambda: enqueue(0, 1000))
    without, _, same = spent(off, lambda: enqueue(0, 1000))
    assert answers == same == made
    row("1,000 duplicates of 4 KB: sent, filter on", f"{with_it / 1e6:.2f} MB")
    row("1,000 duplicates of 4 KB: sent, filter off", f"{without / 1e6:.2f} MB, {without / with_it:.1f}x")
    fresh_on, _, _ = spent(on, lambda: enqueue(10_000, 1000))
    fresh_off, _, _ = spent(off, lambda: enqueue(20_000, 1000))
    row("1,000 new keys: sent, on against off", f"{fresh_on / fresh_off:.3f}x")

    def ask_for(ids: list[str]) -> list[str]:
        found = []
        for task_id in ids * 5:
            try:
                services.heartbeat(tenant, task_id, "w").run_sync()
            except errors.CodeqError as error:
                found.append(error.code)
        return found

    for task in services.claim(tenant, ["send"], "w", count=1000).run_sync().tasks:
        services.submit(tenant, "w", [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"1")]).run_sync()
    services.filters = lambda: on  # type: ignore[assignment]
    services.purge(tenant, made).run_sync()
    _, calls_on, answers = spent(on, lambda: ask_for(made))
    _, calls_off, same = spent(off, lambda: ask_for(made))
    assert answers == same
    row("5,000 heartbeats of deleted tasks: commands, on / off", f"{calls_on} / {calls_off}")

    now_ms = maintenance_commands.expired(engine(), tenant.tid).run_sync()[0]
    services.cleanup(tenant.tid).run_sync()
    # Another process's cleanup has listed ids that are gone by now: what is sent for them again.
    root = engine().root(tenant.tid)
    client.zadd(f"{root}expiry:{tenant.tid}", dict.fromkeys(made, now_ms - 1))
    sent_on, _, _ = spent(on, lambda: services.cleanup(tenant.tid).run_sync())
    sent_off, _, _ = spent(off, lambda: services.cleanup(tenant.tid).run_sync())
    row("cleanup over 1,000 ids removed already: sent, on / off", f"{sent_on} / {sent_off} bytes")


if __name__ == "__main__":
    main()
