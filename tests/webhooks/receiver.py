"""A webhook receiver whose responses a test chooses: good, bad, slow or none."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
Answer = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Request:
    """A received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    """Respond with a status; keyword arguments are headers, as in `retry_after="5"`."""
    lines = [f"HTTP/1.1 {code} Reason", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def raw(data: bytes) -> Answer:
    """Respond with these bytes."""

    async def answer(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


async def hang(_: Request, writer: asyncio.StreamWriter) -> None:
    """Never respond."""
    await asyncio.sleep(3600)


def drip(head: bytes, chunk: bytes, every: float = 0.05) -> Answer:
    """Respond with a head, then with a chunk every `every` seconds, without end."""

    async def answer(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            await writer.drain()
            await asyncio.sleep(every)
            writer.write(chunk)

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Give the answers in order; repeat the last one."""
    remaining = list(answers)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await (remaining.pop(0) if len(remaining) > 1 else remaining[0])(request, writer)

    return answer


@dataclass
class Receiver:
    """Listens in a thread of its own. `requests` has the received requests in order."""

    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    answer: Answer = field(default_factory=lambda: raw(OK))
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    def start(self) -> Receiver:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=[ready], name="receiver", daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)

    def url(self, path: str = "/hook", host: str | None = None) -> str:
        name = host or (f"[{self.host}]" if ":" in self.host else self.host)
        return f"http{'s' if self.tls else ''}://{name}:{self.port}{path}"

    def _serve(self, ready: threading.Event) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._listen(ready))

    async def _listen(self, ready: threading.Event) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._handle, self.host, self.port, ssl=self.tls, limit=2**24, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stopping.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # a closed transport is released in the loop's next iteration

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer.transport):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ", 2)
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(method, path, headers, body)
            self.requests.append(request)
            await self.answer(request, writer)
