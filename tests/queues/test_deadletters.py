"""Dead letters: groups, filters, pages, replay with a new payload, deletion and export."""

from __future__ import annotations

import csv
import io
import json
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from core import errors
from core.redis.connections import client
from queues import failure_ids, periodic_tasks, selectors, services
from queues.deadletters import exports, failure_groups, queries
from queues.deadletters.queries import Filter
from queues.models import AuditedResult
from queues.search import pagination
from tenants.domain import TenantSnapshot
from tests.factories import AuditedResultFactory
from tests.fixtures.queues import Queue, explain_queries

pytestmark = pytest.mark.django_db(transaction=True)

NOW = datetime.now(UTC).replace(microsecond=0)


def name_case(value: object) -> str:
    """Name a test case without its times, which differ between the workers of xdist."""
    return re.sub(r"datetime\.datetime\([^)]*\)", "then", repr(value))


CreateRows = Callable[..., list[str]]


@pytest.fixture
def live(tenant: TenantSnapshot) -> Queue:
    """A queue on Redis' own clock, whose times the audit stores."""
    return Queue(tenant, "render")


@pytest.fixture
def create_rows(tenant: TenantSnapshot) -> CreateRows:
    """Create rows of dead letters as the drain writes them. The first one died last."""

    def make(count: int = 1, *, tid: str = tenant.tid, at: datetime = NOW, **fields: Any) -> list[str]:
        fields = {"tenant_id": tid, "payload": '{"n":1}', "created_at": at - timedelta(hours=1)} | fields
        rows = [
            AuditedResultFactory.build(is_dead_letter=True, ended_at=at - timedelta(seconds=number), **fields)
            for number in range(count)
        ]
        for row in rows:
            row.fingerprint = failure_ids.failure_id(row.command, row.error)
        AuditedResult.objects.bulk_create(rows)
        return [str(row.task_id) for row in rows]

    return make


def ids_of(page: queries.DeadLetterPage) -> list[str]:
    return [letter.id for letter in page.letters]


def list_ids(tenant: TenantSnapshot, **conditions: Any) -> list[str]:
    return ids_of(queries.page([tenant.tid], Filter(**conditions)))


@pytest.mark.spec("ADM-2", "Dead letters are grouped by failure: messages that differ only in numbers are one failure")
def test_dead_letters_are_grouped_by_failure(tenant: TenantSnapshot, create_rows: CreateRows) -> None:
    for number in range(3):
        create_rows(error=f"timeout after {number} ms", at=NOW - timedelta(hours=number * 5))
    create_rows(2, error="no such customer", at=NOW - timedelta(days=3))
    create_rows(error="timeout after 5 ms", command="mail")
    create_rows(error="timeout after 5 ms", is_dead=False)
    groups = failure_groups.groups([tenant.tid])
    assert [(group.command, group.error, group.count) for group in groups] == [
        ("render", "timeout after 0 ms", 3),
        ("render", "no such customer", 2),
        ("mail", "timeout after 5 ms", 1),
    ]
    assert (groups[0].last_at, groups[0].first_at) == (NOW, NOW - timedelta(hours=10))
    assert (sum(groups[0].trend), groups[0].trend[-1], sum(groups[1].trend)) == (3, 1, 0)
    assert [group.command for group in failure_groups.groups([tenant.tid], command="mail")] == ["mail"]
    assert len(list_ids(tenant, command="render", failure=groups[0].failure)) == 3
    assert len(list_ids(tenant, failure=groups[0].failure)) == 3


@pytest.mark.spec("ADM-2", "The list is filtered by command, words, age, deliveries and a JSON path of the payload")
@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, "abcd"),
        ({"command": "mail"}, "d"),
        ({"text": "gateway"}, "a"),
        ({"text": "gateway bad"}, "a"),
        ({"text": "gateway good"}, ""),
        ({"text": "gatew"}, "a"),
        ({"text": "CUSTOMER"}, "bc"),
        ({"text": "w-9"}, "c"),
        ({"error": "customer"}, ""),
        ({"error": "disk full"}, "bc"),
        ({"error": "full disk", "text": "seven"}, "b"),
        ({"died_after": NOW - timedelta(hours=2, minutes=30)}, "abc"),
        ({"died_before": NOW - timedelta(minutes=30)}, "bcd"),
        ({"deliveries_from": 3}, "bc"),
        ({"deliveries_from": 3, "deliveries_to": 3}, "b"),
        ({"json_path": "$.customer.id == 42"}, "c"),
        ({"json_path": "$.customer"}, "bc"),
        ({"json_path": '$.customer.name ? (@ starts with "se")'}, "b"),
        ({"json_path": "$.urgent"}, "a"),
        ({"command": "render", "json_path": "$.customer", "deliveries_to": 3}, "b"),
        ({"text": "none-has-this"}, ""),
    ],
    ids=name_case,
)
def test_dead_letters_are_filtered(
    tenant: TenantSnapshot, create_rows: CreateRows, conditions: dict[str, Any], expected: str
) -> None:
    hour = timedelta(hours=1)
    rows = [
        *create_rows(at=NOW, error="502 Bad Gateway", payload='{"urgent":true}'),
        *create_rows(at=NOW - hour, error="disk full", payload='{"customer":{"id":7,"name":"seven"}}', deliveries=3),
        *create_rows(
            at=NOW - 2 * hour, error="Full: the disk", payload='{"customer":{"id":42}}', deliveries=9, worker="host/w-9"
        ),
        *create_rows(
            at=NOW - 3 * hour, error="other", command="mail", payload='{"urgent":false,"big":1e999,"nul":"\\u0000"}'
        ),
    ]
    names = dict(zip(rows, "abcd", strict=True))
    assert "".join(names[task_id] for task_id in list_ids(tenant, **conditions)) == expected
    assert queries.count([tenant.tid], Filter(**conditions)) == len(expected)


@pytest.mark.parametrize("path", ["$[", "x y", '$.a ? (@ like_regex "(")', "drop table"])
def test_invalid_json_path_is_refused_with_the_reason(
    tenant: TenantSnapshot, create_rows: CreateRows, path: str
) -> None:
    create_rows()
    with pytest.raises(errors.InvalidRequest, match="jsonPath: "):
        list_ids(tenant, json_path=path)
    assert len(list_ids(tenant)) == 1  # the connection can still be used


@pytest.mark.parametrize(
    "letter_filter",
    [
        Filter(command="a b"), Filter(command=""), Filter(command="a\0"), Filter(failure="x"), Filter(failure="-" * 16),
        Filter(text="x" * 301), Filter(json_path="\0"), Filter(json_path=""),
    ],
    ids=repr,
)  # fmt: skip
def test_invalid_filter_is_refused(tenant: TenantSnapshot, letter_filter: Filter) -> None:
    with pytest.raises(errors.InvalidRequest):
        queries.page([tenant.tid], letter_filter)


def test_search_that_takes_too_long_is_ended(
    tenant: TenantSnapshot, create_rows: CreateRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "WINDOW_MS", 50)
    create_rows(5)
    # Each row takes as long as an expensive regular expression in a JSON path.
    slow = pagination.Condition("pg_sleep(10) IS NOT NULL")
    for read in (pagination.read_keys, pagination.read_keys_ascending):
        with pytest.raises(errors.InvalidRequest, match="too long"):
            read(pagination.RowFilter(tids=(tenant.tid,), scanned=(slow,)), None, 5)
    assert (
        pagination.count(pagination.RowFilter(tids=(tenant.tid,), scanned=(slow,)), at_most=10, milliseconds=50) is None
    )
    with connection.cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("0",)
    assert len(list_ids(tenant)) == 5


def test_text_without_a_letter_or_digit_is_refused(tenant: TenantSnapshot, create_rows: CreateRows) -> None:
    create_rows()
    for letter_filter in (Filter(text="-- !"), Filter(error='"')):
        with pytest.raises(errors.InvalidRequest, match="must contain a letter or digit"):
            queries.page([tenant.tid], letter_filter)


@pytest.mark.parametrize(
    "text",
    [
        "needle", "NEEDLE", "a-needle", "needle-7", "x_needle_y", "needle.example.org", "https://h.org/a/needle?b=1",
        "jo@needle.org", "k=needle&x=1", "50%needle", "1.5needle"[3:], "<needle>", "<a needle='1'>", "/var/needle/x",
        '{"needle":1}', '["a","needle"]', "#needle", "~needle", "a+needle", "needle,needle", "(needle)", "$needle^",
        "needle's", "&needle;", "*needle*", "v:needle", "schön needle",
    ],
)  # fmt: skip
def test_word_is_found_next_to_any_character(tenant: TenantSnapshot, create_rows: CreateRows, text: str) -> None:
    rows = create_rows(error=text) + create_rows(payload=f'"{text}"', at=NOW - timedelta(hours=1))
    create_rows(error="haystack")
    assert list_ids(tenant, text="needle") == rows
    assert list_ids(tenant, error="Needle") == rows[:1]
    assert list_ids(tenant, text=text[:200]) in (rows, [])


def test_backslashes_in_an_error_are_not_line_breaks(tenant: TenantSnapshot, create_rows: CreateRows) -> None:
    rows = create_rows(error="C:\\needle\\temp")
    assert list_ids(tenant, text="needle temp") == rows


def test_word_is_found_after_a_line_break_in_the_payload(tenant: TenantSnapshot, create_rows: CreateRows) -> None:
    rows = create_rows(payload='"first\\nsecond\\tthird_part"')
    assert [list_ids(tenant, text=word) for word in ("second", "third", "part")] == [rows, rows, rows]


@pytest.mark.spec("TEN-3", "No list, group or count of dead letters includes another tenant's")
def test_tenant_does_not_see_another_tenants_dead_letters(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, create_rows: CreateRows
) -> None:
    create_rows(error="canary of acme")
    other_ids = create_rows(tid=other_tenant.tid, error="canary of acme")
    [group] = failure_groups.groups([other_tenant.tid])
    assert (group.tid, group.count) == (other_tenant.tid, 1)
    by_failure = {"failure": group.failure}
    for conditions in ({}, {"text": "canary"}, by_failure, {"command": "render", **by_failure}):
        assert list_ids(other_tenant, **conditions) == other_ids
        assert queries.count([other_tenant.tid], Filter(**conditions)) == 1
    assert queries.page([], Filter()).letters == []
    assert failure_groups.groups([]) == []
    assert queries.count([], Filter()) == 0
    assert [type(item) for item in queries.replay(tenant, other_ids)] == [errors.TaskNotFound]
    assert [type(item) for item in queries.delete(tenant, other_ids)] == [errors.TaskNotFound]
    assert list_ids(other_tenant) == other_ids
    both = [tenant.tid, other_tenant.tid]
    assert len(queries.page(both, Filter()).letters) == len(queries.page(None, Filter(text="canary")).letters) == 2


def read_all_pages(tids: list[str] | None, letter_filter: Filter, limit: int) -> Iterator[list[str]]:
    cursor = None
    while True:
        page = queries.page(tids, letter_filter, cursor=cursor, limit=limit)
        yield ids_of(page)
        cursor = page.cursor
        if cursor is None:
            return


@pytest.mark.parametrize(
    "letter_filter",
    [Filter(), Filter(text="boom"), Filter(deliveries_from=1)],
    ids=["all", "words", "scanned"],
)
@pytest.mark.parametrize("tenants", ["one", "two", "all"])
def test_pages_have_every_row_once_in_order(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, create_rows: CreateRows, letter_filter: Filter, tenants: str
) -> None:
    expected, other_ids = create_rows(12), create_rows(12, tid=other_tenant.tid)
    if tenants != "one":
        expected += other_ids
    tids = {"one": [tenant.tid], "two": [tenant.tid, other_tenant.tid], "all": None}[tenants]
    seen = [task_id for page in read_all_pages(tids, letter_filter, 5) for task_id in page]
    assert sorted(seen) == sorted(expected)
    keys = {str(row.pk): (row.ended_at, row.pk) for row in AuditedResult.objects.all()}
    assert seen == sorted(seen, key=keys.__getitem__, reverse=True)


def test_dead_letters_with_the_same_time_are_all_listed(tenant: TenantSnapshot, create_rows: CreateRows) -> None:
    expected = [task_id for _ in range(11) for task_id in create_rows()]
    seen = [task_id for page in read_all_pages([tenant.tid], Filter(), 3) for task_id in page]
    assert sorted(seen) == sorted(expected)


def test_new_dead_letters_do_not_shift_the_next_page(tenant: TenantSnapshot, create_rows: CreateRows) -> None:
    expected = create_rows(6)
    first = queries.page([tenant.tid], Filter(), limit=3)
    create_rows(5, at=NOW + timedelta(minutes=1))
    second = queries.page([tenant.tid], Filter(), cursor=first.cursor, limit=3)
    assert [*ids_of(first), *ids_of(second)] == expected


@pytest.mark.parametrize(
    "cursor", ["", "nonsense", "1-", "9" * 40 + "-" + "a" * 32, "1-" + "g" * 32, "99999999999999999-" + "a" * 32]
)
def test_invalid_cursor_is_refused(tenant: TenantSnapshot, cursor: str) -> None:
    if cursor in ("", "99999999999999999-" + "a" * 32):
        assert queries.page([tenant.tid], Filter(), cursor=cursor).letters == []
        return
    with pytest.raises(errors.InvalidRequest, match="cursor"):
        queries.page([tenant.tid], Filter(), cursor=cursor)


@pytest.mark.spec("ADM-2", "The work for a page of a list is limited: the page ends early, with a cursor to continue")
def test_page_scans_a_limited_number_of_rows(
    tenant: TenantSnapshot, create_rows: CreateRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "SCAN_LIMIT", 40)
    monkeypatch.setattr(pagination, "WINDOW", 10)
    create_rows(90)
    [needle] = create_rows(at=NOW - timedelta(hours=1), deliveries=7)
    pages = list(read_all_pages([tenant.tid], Filter(deliveries_from=7), 5))
    assert pages == [[], [], [needle]]


@pytest.mark.parametrize("limit", [10, pagination.MAX_WORD_MATCHES])
def test_very_common_words_are_found(
    tenant: TenantSnapshot, create_rows: CreateRows, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A page is read with the index of words, or by a scan if too many rows match to sort them."""
    monkeypatch.setattr(pagination, "MAX_WORD_MATCHES", limit)
    expected = create_rows(40, error="everywhere")
    create_rows(5, error="elsewhere")
    assert [
        task_id for page in read_all_pages([tenant.tid], Filter(text="everywhere"), 7) for task_id in page
    ] == expected


INDEXED_READS: dict[str, tuple[Callable[[str], object], str]] = {
    "groups": (lambda tid: failure_groups.groups([tid]), "audited_dead_failure"),
    "groups of a queue": (lambda tid: failure_groups.groups([tid], command="render"), "audited_dead_failure"),
    "queue": (lambda tid: queries.page([tid], Filter(command="render"), limit=50), "audited_dead"),
    "tenant": (lambda tid: queries.page([tid], Filter(), limit=50), "audited_dead_tenant"),
    "tenants": (lambda tid: queries.page([tid, "zeta0002"], Filter(), limit=50), "audited_dead_tenant"),
    "all": (lambda tid: queries.page(None, Filter(), limit=50), "audited_dead_all"),
    "failure": (
        lambda tid: queries.page([tid], Filter(command="render", failure="0" * 16)),
        "audited_dead_failure",
    ),
    "words": (lambda tid: queries.page([tid], Filter(text="needle")), "audited_words"),
}


@pytest.mark.spec("ADM-2", "An index answers lists and groups of dead letters, regardless of their number")
def test_lists_are_answered_by_an_index(
    tenant: TenantSnapshot, create_rows: CreateRows, subtests: pytest.Subtests
) -> None:
    # Rows that earlier tests deleted would still take up pages, which the planner counts.
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE queues_auditedresult")
    # As in production, few of the rows are dead letters. The planner chooses by their share.
    for number in range(40):
        create_rows(250, tid=f"other{number:03}", is_dead=False, status="COMPLETED", outcome="COMPLETED", error="")
    create_rows(250)
    create_rows(250, command="mail", error="another")
    create_rows(250, tid="zeta0002")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE queues_auditedresult")
    for name, (read, index) in INDEXED_READS.items():
        with subtests.test(name):
            query_plan = explain_queries(lambda read=read: read(tenant.tid))
            assert f"{index} " in query_plan
            assert "Seq Scan on queues_auditedresult" not in query_plan
            assert "OFFSET" not in query_plan


@pytest.mark.spec("RET-4", "A replayed dead letter is in no list any more, and is ready again")
def test_dead_letter_is_replayed(live: Queue) -> None:
    task = live.make_dead_letter()
    periodic_tasks.run_drain(lambda: True)
    [again] = queries.replay(live.tenant, [task.id])
    assert not isinstance(again, errors.CodeqError)
    assert list_ids(live.tenant) == []  # at once, before the drain reads the event
    periodic_tasks.run_drain(lambda: True)
    assert list_ids(live.tenant) == []
    assert live.claim().id == task.id


@pytest.mark.spec(
    "RET-4", "A replay by any client removes the dead letter from the list; if it dies again, it is listed again"
)
@pytest.mark.parametrize("drains", [0, 1], ids=["drained at the end", "drained at once"])
def test_the_list_follows_the_stream(live: Queue, drains: int) -> None:
    task = live.make_dead_letter()
    for _ in range(2):
        for _ in range(drains):
            periodic_tasks.run_drain(lambda: True)
        services.replay(live.tenant, [task.id]).run_sync()
        services.nack(live.tenant, live.claim().id, "w1", reason="again").run_sync()
    periodic_tasks.run_drain(lambda: True)
    assert list_ids(live.tenant) == [task.id]
    services.replay(live.tenant, [task.id]).run_sync()
    periodic_tasks.run_drain(lambda: True)
    assert list_ids(live.tenant) == []
    live.complete(live.claim())
    periodic_tasks.run_drain(lambda: True)
    row = AuditedResult.objects.get(pk=task.id)
    assert (row.status, row.is_dead, row.deliveries) == ("COMPLETED", False, 4)


def test_later_death_is_not_cleared_by_an_earlier_position(live: Queue) -> None:
    """The task dies again after its row was read and before its flag is cleared."""
    task = live.make_dead_letter()
    periodic_tasks.run_drain(lambda: True)
    earlier = {uuid.UUID(task.id): AuditedResult.objects.get(pk=task.id).position}
    services.replay(live.tenant, [task.id]).run_sync()
    services.nack(live.tenant, live.claim().id, "w1", reason="again").run_sync()
    periodic_tasks.run_drain(lambda: True)
    queries.clear_dead_flags(live.tenant.tid, earlier)
    assert list_ids(live.tenant) == [task.id]


@pytest.mark.spec("ADM-2", "A payload can be corrected before the replay")
def test_dead_letter_is_replayed_with_a_new_payload(live: Queue) -> None:
    poisoned, other = live.make_dead_letter(payload='{"amount":"x"}'), live.make_dead_letter(payload='"other"')
    periodic_tasks.run_drain(lambda: True)
    queries.replay(live.tenant, [poisoned.id, other.id], {poisoned.id: '{ "amount": 1.10 }'})
    assert [live.claim().spec.payload, live.claim().spec.payload] == ['{"amount":1.10}', '"other"']


@pytest.mark.parametrize("payload", ["", "{", "null", "NaN", '"\ud800"', "1 2"])
def test_invalid_json_is_refused_and_no_task_is_replayed(live: Queue, payload: str) -> None:
    task = live.make_dead_letter()
    with pytest.raises(errors.InvalidRequest):
        queries.replay(live.tenant, [task.id], {task.id: payload})
    assert selectors.queue_stats(live.tenant, "render").run_sync().dlq == 1


def test_new_payload_is_limited_like_the_tenants_payloads(live: Queue) -> None:
    task = live.make_dead_letter()
    with pytest.raises(errors.PayloadTooLarge):
        queries.replay(live.tenant, [task.id], {task.id: '"' + "x" * live.tenant.payload_bytes + '"'})


@pytest.mark.spec("ADM-2", "Only dead letters can be deleted; their attempts stay in the audit")
def test_only_dead_letters_are_deleted(live: Queue) -> None:
    dead, finished = live.make_dead_letter(), live.enqueue()
    live.complete(live.claim())
    waiting = live.enqueue()
    periodic_tasks.run_drain(lambda: True)
    results = queries.delete(live.tenant, [dead.id, finished.id, waiting.id, "nonsense", dead.id])
    assert [type(result) for result in results] == [
        type(None), errors.NotDead, errors.NotDead, errors.TaskNotFound, errors.TaskNotFound,
    ]  # fmt: skip
    assert list_ids(live.tenant) == []
    assert selectors.result(live.tenant, finished.id).run_sync()[0].id == finished.id
    periodic_tasks.run_drain(lambda: True)
    assert (list_ids(live.tenant), AuditedResult.objects.get(pk=dead.id).status) == ([], "FAILED")


@pytest.mark.spec("RET-4", "Expired dead letters are in no list any more")
def test_dead_letter_after_its_retention_is_not_listed(tenant: TenantSnapshot) -> None:
    short = TenantSnapshot(tid=tenant.tid, slug=tenant.slug, dead_retention_ms=0)
    Queue(short, "render").make_dead_letter()
    periodic_tasks.run_drain(lambda: True)
    assert len(list_ids(short)) == 1
    assert periodic_tasks.cleanup() == "1 removed"
    periodic_tasks.run_drain(lambda: True)
    assert list_ids(short) == []


def test_replay_of_a_task_that_redis_lost_removes_it_from_the_list(live: Queue) -> None:
    task = live.make_dead_letter()
    periodic_tasks.run_drain(lambda: True)
    client().flushdb()
    assert list_ids(live.tenant) == [task.id]
    assert [type(item) for item in queries.replay(live.tenant, [task.id])] == [errors.TaskNotFound]
    assert list_ids(live.tenant) == []


@pytest.mark.spec(
    "ADM-2", "Dead letters are exported as JSON Lines and as CSV, in which a spreadsheet finds no formulas"
)
def test_export_has_every_dead_letter_and_no_formula(
    tenant: TenantSnapshot, create_rows: CreateRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "PAGE_LIMIT", 4)
    expected = create_rows(9, error="=HYPERLINK(1)", payload='"+1"')
    rows = list(exports.rows([tenant.tid], Filter(error="hyperlink")))
    lines = [json.loads(line) for line in b"".join(exports.as_json_lines(rows)).splitlines()]
    assert [line["id"] for line in lines] == expected
    assert (lines[0]["payload"], lines[0]["error"]) == ('"+1"', "=HYPERLINK(1)")
    table = list(csv.DictReader(io.StringIO(b"".join(exports.as_csv(rows)).decode())))
    assert [row["id"] for row in table] == expected
    assert (table[0]["error"], table[0]["payload"]) == ("'=HYPERLINK(1)", '"+1"')


def test_export_of_an_empty_list_has_the_header_only(tenant: TenantSnapshot) -> None:
    assert b"".join(exports.as_csv(exports.rows([tenant.tid], Filter()))).decode().startswith("id,tenant,")


@pytest.mark.parametrize("number", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_failure_id_is_read_back_from_its_text(number: int) -> None:
    assert failure_ids.from_text(failure_ids.to_text(number)) == number


@pytest.mark.parametrize(
    "text",
    ["", "0123456789abcde", "+123456789abcdef", "0x23456789abcdef", " 123456789abcdef", "0123_456789abcde",
     "0123456789abcdef\n", "٠123456789abcdef"],
)  # fmt: skip
def test_text_of_another_form_is_no_failure_id(text: str) -> None:
    with pytest.raises(ValueError, match="failure id"):
        failure_ids.from_text(text)
