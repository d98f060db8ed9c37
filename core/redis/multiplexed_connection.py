"""One connection to Redis with many requests in flight, for web processes.

The requests of one iteration of the event loop are sent in one write, and answers arrive in order. Throughput is 45 %
higher than with a pool of connections that each wait for their answer (docs/adr/0005). redis-py connects (TLS, AUTH,
SELECT, unix sockets), hiredis parses the answers, and this module matches answers with requests.

If the connection is lost, all waiting requests fail with `ConnectionError`. They are not sent again, because Redis may
have run them. The next request connects again. An overdue answer closes the connection too, because all later answers
wait behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
import redis.asyncio
from redis.exceptions import ConnectionError, RedisError

from core.redis.error_replies import parse_error_reply
from core.redis.runners import RedisCommand


class MultiplexedConnection:
    """A connection that connects on first use and again after it was lost."""

    def __init__(self, url: str, *, timeout_seconds: float = 5.0, max_in_flight: int = 10_000) -> None:
        self._pool = redis.asyncio.ConnectionPool.from_url(url, protocol=2)
        self._timeout_seconds = timeout_seconds
        self._max_in_flight = max_in_flight
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None

    async def send(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Return the answers in the order of the commands, with errors of Redis as values."""
        link = self._link
        if link is None or link.is_lost:
            link = await self._connect_once()
        if len(link.waiting) >= self._max_in_flight:
            raise ConnectionError("Redis is too slow: too many requests in flight")
        if link.is_full:
            await link.until_writable()
        return await link.send(commands)

    async def close(self) -> None:
        if self._link:
            self._link.close()

    async def _connect_once(self) -> _Link:
        """Connect. Concurrent callers wait for the same attempt."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Link:
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await connection.connect()
        except RedisError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error
        # redis-py has connected and authenticated. From here on, this module reads, writes and closes the connection.
        writer: asyncio.StreamWriter = connection._writer
        connection._reader = connection._writer = None
        self._link = _Link(writer, self._timeout_seconds)
        writer.transport.set_protocol(self._link)
        self._link.connection_made(writer.transport)
        return self._link


class _Link(asyncio.Protocol):
    """The protocol of one connection, from its start to its loss."""

    def __init__(self, writer: asyncio.StreamWriter, timeout_seconds: float) -> None:
        self._writer = writer  # a reference, because the writer closes the transport when it is collected
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=parse_error_reply)
        self._transport: Any = None
        self._outgoing: list[bytes] = []
        self._answers: list[Any] = []
        # The future of each request, its number of answers and its start, in the order in which Redis answers.
        self.waiting: deque[tuple[asyncio.Future[list[Any]], int, float]] = deque()
        self.is_lost = False
        self.is_full = False
        self._writable: asyncio.Future[None] | None = None

    def send(self, commands: Sequence[RedisCommand]) -> asyncio.Future[list[Any]]:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        for command in commands:
            self._outgoing.append(hiredis.pack_command(command))
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        self.waiting.append((answer, len(commands), self._loop.time()))
        return answer

    def until_writable(self) -> asyncio.Future[None]:
        if self._writable is None:
            self._writable = self._loop.create_future()
        return asyncio.shield(self._writable)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._loop.call_later(self._timeout_seconds / 5, self._check_overdue)

    def data_received(self, data: bytes) -> None:
        reader, waiting, answers = self._reader, self.waiting, self._answers
        try:
            reader.feed(data)
            while (answer := reader.gets()) is not False:
                answers.append(answer)
                future, count, _ = waiting[0]
                if len(answers) == count:
                    waiting.popleft()
                    if not future.done():  # it is done if its caller was cancelled
                        future.set_result(answers)
                    answers = self._answers = []
        except (hiredis.ProtocolError, IndexError) as error:
            self._lose(ConnectionError(f"Redis sent an invalid answer: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(ConnectionError(f"the connection to Redis was lost: {error or 'closed by the server'}"))

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._resume_senders(None)

    def _flush(self) -> None:
        if not self.is_lost:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _check_overdue(self) -> None:
        if self.is_lost:
            return
        if self.waiting and self._loop.time() - self.waiting[0][2] > self._timeout_seconds:
            self._lose(ConnectionError(f"no answer from Redis for {self._timeout_seconds} s"))
        else:
            self._loop.call_later(self._timeout_seconds / 5, self._check_overdue)

    def _lose(self, error: ConnectionError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._transport.abort()
        while self.waiting:
            future = self.waiting.popleft()[0]
            if not future.done():
                future.set_exception(error)
        self._resume_senders(error)

    def _resume_senders(self, error: ConnectionError | None) -> None:
        if self._writable and not self._writable.done():
            if error:
                self._writable.set_exception(error)
            else:
                self._writable.set_result(None)
        self._writable = None
