"""The marts over HTTP: a tenant's own rows by day and command, in pages."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
import pytest_asyncio
from django.db import connection

from core import threadpool
from pipeline.models import MARTS, Failure, Latency, LeaseAdvice, Mart
from pipeline.selectors import MAX_DAYS
from tenants.cache import tenant_cache
from tests.factories import DAY, factory_of
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import NORTH, SOUTH

MakeClient = Callable[..., Client]
PATH = "/v1/codeq/insights"
CANARY = "kanarie"


def tid(slug: str) -> str:
    tenant = tenant_cache.find(slug)
    assert tenant is not None
    return tenant.tid


def build_row(mart: type[Mart], slug: str = NORTH, **columns: Any) -> Any:
    return factory_of(mart).build(tenant_id=tid(slug), **columns)


@pytest_asyncio.fixture(loop_scope="session")
async def write(_registry: None) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that commits rows, which other threads read. They are deleted later."""

    def create(new: list[Mart]) -> None:
        for row in new:
            row.save()

    yield lambda *rows: threadpool.run_db(create, list(rows))
    for mart in MARTS.values():
        await threadpool.run_db(mart._default_manager.all().delete)


async def get_mart(client: Client, mart: str, **parameters: Any) -> Any:
    return await client.get(f"{PATH}/{mart}?{urlencode({'from': DAY, 'to': DAY + timedelta(days=1)} | parameters)}")


@pytest.mark.spec("PIP-4", "A tenant reads its marts by API: every mart, every column")
@pytest.mark.parametrize("mart", MARTS)
async def test_every_mart_and_column_is_returned(producer: Client, write: Any, mart: str) -> None:
    model = MARTS[mart]
    written = build_row(model)
    await write(written)
    response = await get_mart(producer, mart)
    assert (response.status, response.json["mart"]) == (200, mart)
    [returned_row] = response.json["rows"]
    columns = {
        name: getattr(written, name) for column in model._meta.fields if (name := column.name) not in ("id", "tenant")
    }
    expected = {name.replace("_", ""): msgspec.to_builtins(value) for name, value in columns.items()}
    assert {name.lower(): value for name, value in returned_row.items()} == expected


async def test_empty_values_are_left_out(producer: Client, write: Any) -> None:
    await write(build_row(LeaseAdvice, run_p50_ms=None, lease_advice_seconds=None))
    [returned_row] = (await get_mart(producer, "leases")).json["rows"]
    assert "runP50Ms" not in returned_row
    assert "leaseAdviceSeconds" not in returned_row
    assert returned_row["runMaxMs"] == 2**40


@pytest.mark.spec("PIP-4", "No mart shows a tenant the rows of another one")
@pytest.mark.parametrize("mart", MARTS)
async def test_rows_of_other_tenants_are_not_returned(
    producer: Client, client: MakeClient, write: Any, mart: str
) -> None:
    model = MARTS[mart]
    words = {name: CANARY for name in ("command", "endpoint", "fingerprint") if hasattr(model, name)}
    await write(build_row(model, SOUTH, **words))
    queries = [{}, {"limit": 1}] + ([{"command": CANARY}] if hasattr(model, "command") else [])
    for parameters in queries:
        response = await get_mart(producer, mart, **parameters)
        assert (response.status, response.json) == (200, {"mart": mart, "rows": []})
    # A cursor of the other tenant does not show its rows either.
    await write(build_row(model, SOUTH, date=DAY + timedelta(days=1), **words))
    days = {"to": DAY + timedelta(days=2), "limit": 1}
    theirs = await get_mart(client("producer", SOUTH), mart, **days)
    response = await get_mart(producer, mart, **days, cursor=theirs.json["cursor"])
    assert (response.status, response.json["rows"]) == (200, [])
    assert CANARY not in response.body.decode()


@pytest.mark.spec("PIP-4", "The rows are those of the requested days: from `from` to the day before `to`, in UTC")
async def test_requested_days(producer: Client, write: Any) -> None:
    days = [DAY + timedelta(days=n) for n in range(-2, 4)]
    await write(*(build_row(Latency, date=day) for day in days))
    response = await get_mart(producer, "latency", **{"from": DAY, "to": DAY + timedelta(days=2)})
    assert [row["date"] for row in response.json["rows"]] == ["2026-03-10", "2026-03-11"]
    only_to = await producer.get(f"{PATH}/latency?to={DAY}")
    assert [row["date"] for row in only_to.json["rows"]] == ["2026-03-08", "2026-03-09"]


async def test_default_days_end_today(producer: Client, write: Any) -> None:
    today = datetime.now(UTC).date()
    days = [today - timedelta(days=n) for n in (0, 6, 7)]
    await write(*(build_row(Latency, date=day) for day in days))
    rows = (await producer.get(f"{PATH}/latency")).json["rows"]
    assert [row["date"] for row in rows] == [days[1].isoformat(), days[0].isoformat()]


async def test_one_command(producer: Client, write: Any) -> None:
    await write(*(build_row(Latency, command=command) for command in ("mail.send", "render", "render.big")))
    rows = (await get_mart(producer, "latency", command="render")).json["rows"]
    assert [row["command"] for row in rows] == ["render"]


@pytest.mark.spec("PIP-4", "The pages of a mart hold every row once, for any text in its key")
async def test_pages_hold_every_row_once(producer: Client, write: Any) -> None:
    names = ["render: HTTP 503 é \u2028 \"'", "render: disk full", "z" * 300]
    keys = [(DAY + timedelta(days=n), c, f) for n in range(2) for c in ("a", "b.c", "z") for f in names]
    await write(*(build_row(Failure, date=d, command=c, fingerprint=f) for d, c, f in reversed(keys)))
    keys_of_pages, cursor = [], None
    for _ in range(len(keys)):
        parameters = {"to": DAY + timedelta(days=2), "limit": 4} | ({"cursor": cursor} if cursor else {})
        page = (await get_mart(producer, "failures", **parameters)).json
        keys_of_pages += [(date.fromisoformat(r["date"]), r["command"], r["fingerprint"]) for r in page["rows"]]
        cursor = page.get("cursor")
        if cursor is None:
            break
    assert sorted(keys_of_pages) == sorted(keys)
    assert [(d, c) for d, c, _ in keys_of_pages] == [(d, c) for d, c, _ in sorted(keys_of_pages)]


def encode_cursor(*values: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


REFUSED = [
    "from=2026-03-10&to=2026-03-10",
    "from=2026-03-11&to=2026-03-10",
    "from=2026-03-10T00:00:00Z",
    "from=10.03.2026",
    "from=2026-02-30",
    "from=",
    "to=0001-01-01",
    "to=9999-12-31",
    "from=0001-01-01&to=0001-01-02",
    f"from=2026-01-01&to={date(2026, 1, 1) + timedelta(days=MAX_DAYS + 1)}",
    "command=",
    "command=a%00b",
    "command=a/b",
    "limit=0",
    "limit=1001",
    "limit=x",
    "cursor=",
    "cursor=x",
    "cursor=%00",
    "cursor=%C3%A9",
    f"cursor={encode_cursor(1, 2, 3)}",
    f"cursor={encode_cursor('2026-03-10', 'a')}",
    f"cursor={encode_cursor('2026-03-10', 'a', '2026-03-10T00:00:00')}",
    "cursor=" + encode_cursor("2026-03-10", "a\x00", "2026-03-10T00:00:00Z"),
    "tenant=acme",
    "from=2026-03-10&from=2026-03-11",
]


@pytest.mark.parametrize("query", REFUSED)
async def test_invalid_query_is_refused(producer: Client, query: str) -> None:
    response = await producer.get(f"{PATH}/latency?{query}")
    assert (response.status, response.code) == (400, "invalid_request")


@pytest.mark.parametrize("mart", ["usage", "webhooks"])
async def test_command_is_refused_for_a_mart_without_commands(producer: Client, mart: str) -> None:
    response = await get_mart(producer, mart, command="render")
    assert (response.status, response.code) == (400, "invalid_request")
    assert "not by command" in response.json["detail"]


@pytest.mark.parametrize("name", ["nothing", "Latency", "runlog", "%00", "latency%20", "published"])
async def test_unknown_mart_is_not_found(producer: Client, name: str) -> None:
    response = await producer.get(f"{PATH}/{name}")
    assert (response.status, response.code) == (404, "not_found")


@pytest.mark.parametrize("command", [None, "render"])
async def test_page_uses_the_index_of_the_key(producer: Client, write: Any, command: str | None) -> None:
    """The cost does not depend on other tenants: tenant and day lead the index."""
    south, others = tid(SOUTH), [f"t{n}" for n in range(20)]

    def fill() -> None:
        hours = [datetime(2026, 3, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(24 * 20)]
        latency_rows = [
            build_row(Latency, date=hour.date(), hour=hour, command=command)
            for hour in hours
            for command in ("mail.send", "render")
        ]
        for name in (south, *others):
            for latency_row in latency_rows:
                latency_row.pk, latency_row.tenant_id = None, name
            Latency.objects.bulk_create(latency_rows)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE pipeline_latency")

    def explain_page() -> str:
        from pipeline import selectors

        plan_lines: list[str] = []

        def explained(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN {sql}", params)
                plan_lines.extend(line for (line,) in cursor.cursor.fetchall())
            return execute(sql, params, many, context)

        with connection.execute_wrapper(explained):
            selectors.read_page(
                Latency, south, selectors.parse_period(DAY, DAY + timedelta(days=3)), command=command,
                cursor=encode_cursor("2026-03-11", "render", "2026-03-11T05:00:00Z"), limit=50,
            )  # fmt: skip
        return "\n".join(plan_lines)

    await threadpool.run_db(fill)
    query_plan = await threadpool.run_db(explain_page)
    assert "latency_key" in query_plan or "latency_day" in query_plan, query_plan
    assert "Seq Scan" not in query_plan, query_plan
