"""The multiplexed connection to Redis, and what its callers get when the server fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError, NoScriptError, ResponseError

from codeq_site.devserver.embedded import Valkey
from core.errors import Unavailable
from core.redis.multiplexed_connection import MultiplexedConnection
from core.redis.runners import AsyncRunner, SyncRunner
from queues.engine.script_loader import load


@pytest.fixture
def server(valkey_server: Callable[..., Valkey]) -> Valkey:
    return valkey_server(appendonly="no")


@pytest.fixture
async def connection(server: Valkey) -> AsyncIterator[MultiplexedConnection]:
    connection = MultiplexedConnection(server.url, timeout_seconds=2.0)
    yield connection
    await connection.close()


async def echo(connection: MultiplexedConnection, text: str) -> Any:
    return (await connection.send([("ECHO", text)]))[0]


async def test_many_requests_share_one_connection_and_get_their_own_replies(connection: MultiplexedConnection) -> None:
    replies = await asyncio.gather(*(echo(connection, f"{n}") for n in range(2000)))
    assert replies == [f"{n}".encode() for n in range(2000)]
    clients = (await connection.send([("CLIENT", "LIST")]))[0]
    assert clients.count(b"cmd=client|list") == len(clients.splitlines()) == 1


async def test_replies_are_in_the_order_of_the_commands_and_errors_are_values(
    connection: MultiplexedConnection,
) -> None:
    first, second, third, fourth = await connection.send(
        [("SET", "k", b"\x00\xff"), ("LPUSH", "k", "x"), ("EVALSHA", "0" * 40, 0), ("GET", "k")]
    )
    assert (first, fourth) == (b"OK", b"\x00\xff")
    assert isinstance(second, ResponseError)
    assert isinstance(third, NoScriptError)


async def test_large_reply_is_complete(connection: MultiplexedConnection) -> None:
    await connection.send([("SET", "k", b"x" * 10_000_000)])
    small, large = await asyncio.gather(echo(connection, "a"), connection.send([("GET", "k")]))
    assert small == b"a"
    assert len(large[0]) == 10_000_000


async def test_dead_server_fails_all_waiting_requests_and_the_next_one_reconnects(
    connection: MultiplexedConnection, server: Valkey
) -> None:
    await echo(connection, "a")
    os.kill(server.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(echo(connection, f"{n}")) for n in range(50)]
    await asyncio.sleep(0)
    server.kill()
    replies = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(reply) for reply in replies} == {ConnectionError}
    with pytest.raises(ConnectionError):
        await echo(connection, "no server")
    server.start()
    assert await echo(connection, "back") == b"back"


async def test_requests_to_a_hanging_server_fail_at_their_deadline(
    connection: MultiplexedConnection, server: Valkey
) -> None:
    await echo(connection, "a")
    loop = asyncio.get_running_loop()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        started = loop.time()
        replies = await asyncio.gather(*(echo(connection, f"{n}") for n in range(100)), return_exceptions=True)
        assert loop.time() - started < 15
        assert {type(reply) for reply in replies} == {ConnectionError}
        with pytest.raises((ConnectionError, TimeoutError)):
            await echo(connection, "no reply")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await echo(connection, "back") == b"back"


async def test_cancelled_request_does_not_shift_the_replies_of_others(connection: MultiplexedConnection) -> None:
    await echo(connection, "a")
    tasks = [asyncio.create_task(echo(connection, f"{n}")) for n in range(100)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    for n, reply in enumerate(replies):
        assert isinstance(reply, asyncio.CancelledError) if n % 3 == 0 else reply == f"{n}".encode()
    assert await echo(connection, "next") == b"next"


async def test_requests_above_the_in_flight_limit_are_refused_at_once(server: Valkey) -> None:
    connection = MultiplexedConnection(server.url, max_in_flight=10)
    await echo(connection, "a")
    replies = await asyncio.gather(*(echo(connection, f"{n}") for n in range(30)), return_exceptions=True)
    assert [isinstance(reply, bytes) for reply in replies] == [True] * 10 + [False] * 20
    assert await echo(connection, "below the limit") == b"below the limit"
    await connection.close()


async def test_hundred_concurrent_requests_open_one_connection(
    connection: MultiplexedConnection, server: Valkey
) -> None:
    await asyncio.gather(*(echo(connection, f"{n}") for n in range(100)))
    info = (await connection.send([("INFO", "stats")]))[0]
    before = int(dict(line.split(b":") for line in info.splitlines() if b":" in line)[b"total_connections_received"])
    server.kill()
    server.start()
    await asyncio.gather(*(echo(connection, f"{n}") for n in range(100)), return_exceptions=True)
    await asyncio.gather(*(echo(connection, f"{n}") for n in range(100)))
    info = (await connection.send([("INFO", "clients")]))[0]
    assert b"connected_clients:1\r\n" in info
    assert before <= 3  # starting the server opens connections to check that it is up


async def test_slow_server_blocks_writers_instead_of_filling_memory(
    connection: MultiplexedConnection, server: Valkey
) -> None:
    await echo(connection, "a")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        big = b"x" * 1_000_000
        tasks = [asyncio.create_task(connection.send([("SET", f"k{n}", big)])) for n in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert connection._link is not None
        assert connection._link.is_full
        late = asyncio.create_task(connection.send([("SET", "late", big)]))
        await asyncio.sleep(0)
        assert len(connection._link.waiting) == 3, "the fourth request is not queued yet"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert [reply[0] for reply in await asyncio.gather(*tasks, late)] == [b"OK"] * 4


async def test_runner_loads_a_missing_script_once_and_reports_refused_writes(
    connection: MultiplexedConnection, server: Valkey
) -> None:
    runner = AsyncRunner(connection.send, SyncRunner(None))  # type: ignore[arg-type]
    script = load("pause")
    bound = script.bind(queues="codeq:{0}:queues:t", tenants="codeq:{0}:tenants", tid="t", command="send")
    assert await runner.run([(script, bound)] * 3) == [1, 1, 1]
    await connection.send([("CONFIG", "SET", "min-replicas-to-write", "1")])
    with pytest.raises(Unavailable):
        await runner.run([(script, bound)])
    server.kill()
    with pytest.raises(Unavailable):
        await runner.run([(script, bound)])
