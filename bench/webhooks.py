"""Measure callbacks per second of a worker process, and the effect of a hanging endpoint.

    python -m bench.webhooks [--deliveries 4000]

The receiver is another process on the loopback that reads a request and responds with 200.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.synchronize
import time
import uuid
from datetime import UTC, datetime, timedelta

from bench.servers import create_tenants, print_row, start_servers

HOSTS = 20
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def receive(port: multiprocessing.Queue[int], hangs: bool) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(size))
        if hangs:
            await asyncio.sleep(3600)
        writer.write(RESPONSE)
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=2048)
        number = server.sockets[0].getsockname()[1]
        other_hosts = [f"127.0.0.{host}" for host in range(2, HOSTS + 1)]
        other_server = await asyncio.start_server(handle, other_hosts, number, backlog=2048)
        port.put(number)
        await asyncio.gather(server.serve_forever(), other_server.serve_forever())

    asyncio.run(serve())


def start_receiver(*, hangs: bool = False) -> tuple[multiprocessing.Process, int]:
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    process = multiprocessing.Process(target=receive, args=(port, hangs), daemon=True)
    process.start()
    return process, port.get(timeout=10)


def open_deliveries(tid: str, url: str, count: int, age: timedelta = timedelta()) -> None:
    from core import url_check
    from webhooks.models import Delivery

    created_at, target = datetime.now(UTC) - age, url_check.parse(url)
    body = '{"status":"COMPLETED","result":"' + "x" * 500 + '"}'
    Delivery.objects.bulk_create(
        Delivery(
            tenant_id=tid, task_id=uuid.uuid4(), command="send", url=url, address=target.endpoint_url,
            host=target.host_and_port, body=body, status=Delivery.Status.PENDING, due_at=created_at,
            created_at=created_at,
        )
        for _ in range(count)
    )  # fmt: skip


def measure(count: int, healthy_port: int, hanging_port: int) -> None:
    from webhooks.models import DeliveryAttempt
    from webhooks.sender import Sender

    tid = create_tenants()[0]
    for hosts in (1, HOSTS):
        for number in range(hosts):
            open_deliveries(
                tid,
                f"http://127.0.0.{number + 1}:{healthy_port}/hook" if hosts > 1 else build_url(healthy_port),
                count // hosts,
            )
        sender = Sender()
        started = time.perf_counter()
        asyncio.run(sender.run(lambda: True, 120))
        rate = sender.delivered / (time.perf_counter() - started)
        label = f"callbacks to {hosts} local host{'s' if hosts > 1 else ''}, one process"
        print_row(label, f"{rate:,.0f} /s", ">= 500 /s", rate >= 500)

    DeliveryAttempt.objects.all().delete()
    open_deliveries(tid, build_url(hanging_port), 2000, timedelta(seconds=60))
    opened = datetime.now(UTC)
    open_deliveries(tid, build_url(healthy_port), 2000)
    asyncio.run(Sender().run(lambda: True, 10))
    delays = sorted(
        (started_at - opened).total_seconds()
        for started_at in DeliveryAttempt.objects.filter(status_code=200).values_list("started_at", flat=True)
    )
    p99 = delays[int(len(delays) * 0.99)]
    print_row("p99 wait of 2,000 callbacks while another endpoint hangs", f"{p99:.1f} s", "<= 10 s", p99 <= 10)


def build_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/hook"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deliveries", type=int, default=4000)
    count = parser.parse_args().deliveries
    healthy, hanging = start_receiver(), start_receiver(hangs=True)
    with start_servers(CODEQ_WEBHOOKS_ALLOW_HOSTS="127.0.0.0/8"):
        measure(count, healthy[1], hanging[1])
    for process, _ in (healthy, hanging):
        process.kill()


if __name__ == "__main__":
    main()
