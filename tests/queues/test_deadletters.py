"""Dead letters as operators meet them: grouped, filtered, paged, looked at, mended, replayed, deleted, exported."""

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
from tests.fixtures.queues import Queue, plan

pytestmark = pytest.mark.django_db(transaction=True)

NOW = datetime.now(UTC).replace(microsecond=0)


def without_times(value: object) -> str:
    """The name of a case: the same in every worker of xdist, however late it collects."""
    return re.sub(r"datetime\.datetime\([^)]*\)", "then", repr(value))


Made = Callable[..., list[str]]


@pytest.fixture
def live(tenant: TenantSnapshot) -> Queue:
    """A queue on Redis' own clock: the audit and what is asked of it go by that."""
    return Queue(tenant, "render")


@pytest.fixture
def made(tenant: TenantSnapshot) -> Made:
    """Rows of dead letters, as the drain would have written them; the first died last."""

    def make(count: int = 1, *, tid: str = tenant.tid, at: datetime = NOW, **fields: Any) -> list[str]:
        usual: dict[str, Any] = {
            "tenant_id": tid, "command": "render", "priority": 0, "payload": '{"n":1}', "status": "FAILED",
            "outcome": "NACKED", "is_dead": True, "error": "boom", "attempts": 1, "deliveries": 1, "max_attempts": 1,
            "worker": "w-1", "created_at": at - timedelta(hours=1), "position": 1,
        }  # fmt: skip
        usual |= fields
        rows = [
            AuditedResult(
                task_id=uuid.uuid4(),
                ended_at=at - timedelta(seconds=number),
                fingerprint=failure_ids.failure_id(usual["command"], usual["error"]),
                **usual,
            )
            for number in range(count)
        ]
        AuditedResult.objects.bulk_create(rows)
        return [str(row.task_id) for row in rows]

    return make


def ids(page: queries.DeadLetterPage) -> list[str]:
    return [letter.id for letter in page.letters]


def found(tenant: TenantSnapshot, **asked: Any) -> list[str]:
    return ids(queries.page([tenant.tid], Filter(**asked)))


@pytest.mark.spec("ADM-2", "Dead letters are grouped by failure: the same message but for its numbers is one failure")
def test_dead_letters_are_grouped_by_what_they_died_of(tenant: TenantSnapshot, made: Made) -> None:
    for number in range(3):
        made(error=f"timeout after {number} ms", at=NOW - timedelta(hours=number * 5))
    made(2, error="no such customer", at=NOW - timedelta(days=3))
    made(error="timeout after 5 ms", command="mail")
    made(error="timeout after 5 ms", is_dead=False)
    groups = failure_groups.groups([tenant.tid])
    assert [(group.command, group.error, group.count) for group in groups] == [
        ("render", "timeout after 0 ms", 3),
        ("render", "no such customer", 2),
        ("mail", "timeout after 5 ms", 1),
    ]
    assert (groups[0].last_at, groups[0].first_at) == (NOW, NOW - timedelta(hours=10))
    assert (sum(groups[0].trend), groups[0].trend[-1], sum(groups[1].trend)) == (3, 1, 0)
    assert [group.command for group in failure_groups.groups([tenant.tid], command="mail")] == ["mail"]
    assert len(found(tenant, command="render", failure=groups[0].failure)) == 3
    assert len(found(tenant, failure=groups[0].failure)) == 3


@pytest.mark.spec("ADM-2", "The list is filtered by command, words, age, deliveries and a JSON path of the payload")
@pytest.mark.parametrize(
    ("asked", "expected"),
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
    ids=without_times,
)
def test_dead_letters_are_found_by_what_is_known_of_them(
    tenant: TenantSnapshot, made: Made, asked: dict[str, Any], expected: str
) -> None:
    hour = timedelta(hours=1)
    rows = [
        *made(at=NOW, error="502 Bad Gateway", payload='{"urgent":true}'),
        *made(at=NOW - hour, error="disk full", payload='{"customer":{"id":7,"name":"seven"}}', deliveries=3),
        *made(
            at=NOW - 2 * hour, error="Full: the disk", payload='{"customer":{"id":42}}', deliveries=9, worker="host/w-9"
        ),
        *made(at=NOW - 3 * hour, error="other", command="mail", payload='{"urgent":false,"big":1e999,"nul":"\\u0000"}'),
    ]
    names = dict(zip(rows, "abcd", strict=True))
    assert "".join(names[each] for each in found(tenant, **asked)) == expected
    assert queries.count([tenant.tid], Filter(**asked)) == len(expected)


@pytest.mark.parametrize("path", ["$[", "x y", '$.a ? (@ like_regex "(")', "drop table"])
def test_what_is_no_json_path_is_refused_with_the_reason(tenant: TenantSnapshot, made: Made, path: str) -> None:
    made()
    with pytest.raises(errors.InvalidRequest, match="jsonPath: "):
        found(tenant, json_path=path)
    assert len(found(tenant)) == 1  # the connection is as it was


@pytest.mark.parametrize(
    "asked",
    [
        Filter(command="a b"), Filter(command=""), Filter(command="a\0"), Filter(failure="x"), Filter(failure="-" * 16),
        Filter(text="x" * 301), Filter(json_path="\0"), Filter(json_path=""),
    ],
    ids=repr,
)  # fmt: skip
def test_a_filter_that_can_mean_nothing_is_refused(tenant: TenantSnapshot, asked: Filter) -> None:
    with pytest.raises(errors.InvalidRequest):
        queries.page([tenant.tid], asked)


def test_a_question_that_takes_too_long_is_ended(
    tenant: TenantSnapshot, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "PAGE_MS", 50)
    made(5)
    # A row takes as long as a regular expression in somebody's JSON path may take.
    slow = pagination.Condition("pg_sleep(10) IS NOT NULL")
    for look in (pagination.keys, pagination.ascending):
        with pytest.raises(errors.InvalidRequest, match="too long"):
            look(pagination.RowFilter(tids=(tenant.tid,), where=(slow,)), None, 5)
    assert (
        pagination.count(pagination.RowFilter(tids=(tenant.tid,), where=(slow,)), at_most=10, milliseconds=50) is None
    )
    with connection.cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("0",)
    assert len(found(tenant)) == 5


def test_words_without_a_letter_do_not_stand_for_everything(tenant: TenantSnapshot, made: Made) -> None:
    made()
    for asked in (Filter(text="-- !"), Filter(error='"')):
        with pytest.raises(errors.InvalidRequest, match="no word"):
            queries.page([tenant.tid], asked)


@pytest.mark.parametrize(
    "text",
    [
        "needle", "NEEDLE", "a-needle", "needle-7", "x_needle_y", "needle.example.org", "https://h.org/a/needle?b=1",
        "jo@needle.org", "k=needle&x=1", "50%needle", "1.5needle"[3:], "<needle>", "<a needle='1'>", "/var/needle/x",
        '{"needle":1}', '["a","needle"]', "#needle", "~needle", "a+needle", "needle,needle", "(needle)", "$needle^",
        "needle's", "&needle;", "*needle*", "v:needle", "schön needle",
    ],
)  # fmt: skip
def test_a_word_is_found_whatever_stands_beside_it(tenant: TenantSnapshot, made: Made, text: str) -> None:
    rows = made(error=text) + made(payload=f'"{text}"', at=NOW - timedelta(hours=1))
    made(error="haystack")
    assert found(tenant, text="needle") == rows
    assert found(tenant, error="Needle") == rows[:1]
    assert found(tenant, text=text[:200]) in (rows, [])


def test_a_windows_path_in_an_error_has_no_line_breaks(tenant: TenantSnapshot, made: Made) -> None:
    rows = made(error="C:\\needle\\temp")
    assert found(tenant, text="needle temp") == rows


def test_a_word_is_found_behind_a_line_break_of_the_payload(tenant: TenantSnapshot, made: Made) -> None:
    rows = made(payload='"first\\nsecond\\tthird_part"')
    assert [found(tenant, text=word) for word in ("second", "third", "part")] == [rows, rows, rows]


@pytest.mark.spec("TEN-3", "No question about dead letters is answered with another tenant's")
def test_nobody_sees_another_tenants_dead_letters(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, made: Made
) -> None:
    made(error="canary of acme")
    theirs = made(tid=other_tenant.tid, error="canary of acme")
    [group] = failure_groups.groups([other_tenant.tid])
    assert (group.tid, group.count) == (other_tenant.tid, 1)
    for asked in ({}, {"text": "canary"}, {"failure": group.failure}, {"command": "render", "failure": group.failure}):
        assert found(other_tenant, **asked) == theirs
        assert queries.count([other_tenant.tid], Filter(**asked)) == 1
    assert queries.page([], Filter()).letters == []
    assert failure_groups.groups([]) == []
    assert queries.count([], Filter()) == 0
    assert [type(item) for item in queries.replay(tenant, theirs)] == [errors.TaskNotFound]
    assert [type(item) for item in queries.delete(tenant, theirs)] == [errors.TaskNotFound]
    assert found(other_tenant) == theirs
    both = [tenant.tid, other_tenant.tid]
    assert len(queries.page(both, Filter()).letters) == len(queries.page(None, Filter(text="canary")).letters) == 2


def pages_of(tids: list[str] | None, asked: Filter, limit: int) -> Iterator[list[str]]:
    cursor = None
    while True:
        page = queries.page(tids, asked, cursor=cursor, limit=limit)
        yield ids(page)
        cursor = page.cursor
        if cursor is None:
            return


@pytest.mark.parametrize(
    "asked",
    [Filter(), Filter(text="boom"), Filter(deliveries_from=1)],
    ids=["all", "words", "walked"],
)
@pytest.mark.parametrize("which", ["one", "two", "all"])
def test_pages_follow_each_other_without_a_gap_or_a_repeat(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, made: Made, asked: Filter, which: str
) -> None:
    expected = made(12)
    if which != "one":
        expected = [each for pair in zip(expected, made(12, tid=other_tenant.tid), strict=True) for each in pair]
    else:
        made(12, tid=other_tenant.tid)
    tids = {"one": [tenant.tid], "two": [tenant.tid, other_tenant.tid], "all": None}[which]
    seen = [each for page in pages_of(tids, asked, 5) for each in page]
    assert sorted(seen) == sorted(expected)
    died = {str(row.pk): (row.ended_at, row.pk) for row in AuditedResult.objects.all()}
    assert seen == sorted(seen, key=died.__getitem__, reverse=True)


def test_letters_that_died_in_the_same_moment_are_all_on_some_page(tenant: TenantSnapshot, made: Made) -> None:
    expected = [each for _ in range(11) for each in made()]
    seen = [each for page in pages_of([tenant.tid], Filter(), 3) for each in page]
    assert sorted(seen) == sorted(expected)


def test_what_dies_meanwhile_moves_no_page(tenant: TenantSnapshot, made: Made) -> None:
    expected = made(6)
    first = queries.page([tenant.tid], Filter(), limit=3)
    made(5, at=NOW + timedelta(minutes=1))
    second = queries.page([tenant.tid], Filter(), cursor=first.cursor, limit=3)
    assert [*ids(first), *ids(second)] == expected


@pytest.mark.parametrize(
    "cursor", ["", "nonsense", "1-", "9" * 40 + "-" + "a" * 32, "1-" + "g" * 32, "99999999999999999-" + "a" * 32]
)
def test_a_cursor_that_no_page_gave_is_refused(tenant: TenantSnapshot, cursor: str) -> None:
    if cursor in ("", "99999999999999999-" + "a" * 32):
        assert queries.page([tenant.tid], Filter(), cursor=cursor).letters == []
        return
    with pytest.raises(errors.InvalidRequest, match="cursor"):
        queries.page([tenant.tid], Filter(), cursor=cursor)


@pytest.mark.spec("ADM-2", "No page of a list does unbounded work: it ends early and says where to go on")
def test_a_page_looks_at_so_many_rows_and_no_more(
    tenant: TenantSnapshot, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "SCAN_LIMIT", 40)
    monkeypatch.setattr(pagination, "WINDOW", 10)
    made(90)
    [needle] = made(at=NOW - timedelta(hours=1), deliveries=7)
    walked = list(pages_of([tenant.tid], Filter(deliveries_from=7), 5))
    assert walked == [[], [], [needle]]


@pytest.mark.parametrize("limit", [10, pagination.WORDS_ROWS])
def test_words_that_are_too_common_are_found_all_the_same(
    tenant: TenantSnapshot, made: Made, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """From the words' own index or, where that is too much to sort, along the rows."""
    monkeypatch.setattr(pagination, "WORDS_ROWS", limit)
    expected = made(40, error="everywhere")
    made(5, error="elsewhere")
    assert [each for page in pages_of([tenant.tid], Filter(text="everywhere"), 7) for each in page] == expected


@pytest.mark.spec("ADM-2", "Dead letters are listed and grouped by index, however many there are")
@pytest.mark.parametrize(
    ("asked", "index"),
    [
        (lambda tid: failure_groups.groups([tid]), "audited_dead_failure"),
        (lambda tid: failure_groups.groups([tid], command="render"), "audited_dead_failure"),
        (lambda tid: queries.page([tid], Filter(command="render"), limit=50), "audited_dead"),
        (lambda tid: queries.page([tid], Filter(), limit=50), "audited_dead_tenant"),
        (lambda tid: queries.page([tid, "zeta0002"], Filter(), limit=50), "audited_dead_tenant"),
        (lambda tid: queries.page(None, Filter(), limit=50), "audited_dead_all"),
        (lambda tid: queries.page([tid], Filter(command="render", failure="0" * 16)), "audited_dead_failure"),
        (lambda tid: queries.page([tid], Filter(text="needle")), "audited_words"),
    ],
    ids=["groups", "groups of a queue", "queue", "tenant", "tenants", "all", "failure", "words"],
)
def test_lists_are_answered_by_an_index(
    tenant: TenantSnapshot, made: Made, asked: Callable[[str], object], index: str
) -> None:
    # Two dead among many that are not, as it is in life; the planner must know.
    for number in range(40):
        made(250, tid=f"other{number:03}", is_dead=False, status="COMPLETED", outcome="COMPLETED", error="")
    made(250)
    made(250, command="mail", error="another")
    made(250, tid="zeta0002")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE queues_auditedresult")
    told = plan(lambda: asked(tenant.tid))
    assert f"{index} " in told
    assert "Seq Scan on queues_auditedresult" not in told
    assert "OFFSET" not in told


@pytest.mark.spec("RET-4", "A dead letter that was replayed is in no list from that moment, and in line again")
def test_a_dead_letter_is_replayed(live: Queue) -> None:
    task = live.dead()
    periodic_tasks.run_drain(lambda: True)
    [again] = queries.replay(live.tenant, [task.id])
    assert not isinstance(again, errors.CodeqError)
    assert found(live.tenant) == []  # at once, before the stream has told
    periodic_tasks.run_drain(lambda: True)
    assert found(live.tenant) == []
    assert live.claim().id == task.id


@pytest.mark.spec("RET-4", "A dead letter that was replayed, by whomever, leaves the list; one that died again is back")
@pytest.mark.parametrize("drains", [0, 1], ids=["told of late", "told of at once"])
def test_the_list_follows_the_stream(live: Queue, drains: int) -> None:
    task = live.dead()
    for _ in range(2):
        for _ in range(drains):
            periodic_tasks.run_drain(lambda: True)
        services.replay(live.tenant, [task.id]).run_sync()
        services.nack(live.tenant, live.claim().id, "w1", reason="again").run_sync()
    periodic_tasks.run_drain(lambda: True)
    assert found(live.tenant) == [task.id]
    services.replay(live.tenant, [task.id]).run_sync()
    periodic_tasks.run_drain(lambda: True)
    assert found(live.tenant) == []
    live.complete(live.claim())
    periodic_tasks.run_drain(lambda: True)
    row = AuditedResult.objects.get(pk=task.id)
    assert (row.status, row.is_dead, row.deliveries) == ("COMPLETED", False, 4)


def test_a_death_the_audit_learns_of_late_is_not_unmarked_by_an_older_look(live: Queue) -> None:
    """Between the look at the row and its unmarking the task dies once more: the later death stands."""
    task = live.dead()
    periodic_tasks.run_drain(lambda: True)
    before = {uuid.UUID(task.id): AuditedResult.objects.get(pk=task.id).position}
    services.replay(live.tenant, [task.id]).run_sync()
    services.nack(live.tenant, live.claim().id, "w1", reason="again").run_sync()
    periodic_tasks.run_drain(lambda: True)
    queries.forget(live.tenant.tid, before)
    assert found(live.tenant) == [task.id]


@pytest.mark.spec("ADM-2", "A payload is mended before the replay")
def test_a_poisoned_payload_is_mended(live: Queue) -> None:
    poisoned, other = live.dead(payload='{"amount":"x"}'), live.dead(payload='"other"')
    periodic_tasks.run_drain(lambda: True)
    queries.replay(live.tenant, [poisoned.id, other.id], {poisoned.id: '{ "amount": 1.10 }'})
    assert [live.claim().spec.payload, live.claim().spec.payload] == ['{"amount":1.10}', '"other"']


@pytest.mark.parametrize("payload", ["", "{", "null", "NaN", '"\ud800"', "1 2"])
def test_a_payload_that_is_no_json_is_refused_and_nothing_is_replayed(live: Queue, payload: str) -> None:
    task = live.dead()
    with pytest.raises(errors.InvalidRequest):
        queries.replay(live.tenant, [task.id], {task.id: payload})
    assert selectors.queue_stats(live.tenant, "render").run_sync().dlq == 1


def test_a_mended_payload_has_the_tenants_limit(live: Queue) -> None:
    task = live.dead()
    with pytest.raises(errors.PayloadTooLarge):
        queries.replay(live.tenant, [task.id], {task.id: '"' + "x" * live.tenant.payload_bytes + '"'})


@pytest.mark.spec("ADM-2", "A dead letter is deleted; its attempts stay on record, and nothing else can be deleted so")
def test_only_dead_letters_are_deleted(live: Queue) -> None:
    dead, finished = live.dead(), live.enqueue()
    live.complete(live.claim())
    waiting = live.enqueue()
    periodic_tasks.run_drain(lambda: True)
    wrong = queries.delete(live.tenant, [dead.id, finished.id, waiting.id, "nonsense", dead.id])
    assert [type(each) for each in wrong] == [
        type(None), errors.NotDead, errors.NotDead, errors.TaskNotFound, errors.TaskNotFound,
    ]  # fmt: skip
    assert found(live.tenant) == []
    assert selectors.result(live.tenant, finished.id).run_sync()[0].id == finished.id
    periodic_tasks.run_drain(lambda: True)
    assert (found(live.tenant), AuditedResult.objects.get(pk=dead.id).status) == ([], "FAILED")


@pytest.mark.spec("RET-4", "Dead letters that have expired are in no list any more")
def test_what_retention_has_removed_is_not_listed(tenant: TenantSnapshot) -> None:
    short = TenantSnapshot(tid=tenant.tid, slug=tenant.slug, dead_retention_ms=0)
    Queue(short, "render").dead()
    periodic_tasks.run_drain(lambda: True)
    assert len(found(short)) == 1
    assert periodic_tasks.cleanup() == "1 removed"
    periodic_tasks.run_drain(lambda: True)
    assert found(short) == []


def test_a_row_whose_task_redis_has_lost_leaves_the_list_when_it_is_replayed(live: Queue) -> None:
    task = live.dead()
    periodic_tasks.run_drain(lambda: True)
    client().flushdb()
    assert found(live.tenant) == [task.id]
    assert [type(item) for item in queries.replay(live.tenant, [task.id])] == [errors.TaskNotFound]
    assert found(live.tenant) == []


@pytest.mark.spec(
    "ADM-2", "Dead letters are exported as JSON Lines and CSV, which a spreadsheet cannot mistake for formulas"
)
def test_an_export_has_every_letter_and_runs_nothing(
    tenant: TenantSnapshot, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "PAGE_LIMIT", 4)
    expected = made(9, error="=HYPERLINK(1)", payload='"+1"')
    rows = list(exports.rows([tenant.tid], Filter(error="hyperlink")))
    lines = [json.loads(line) for line in b"".join(exports.as_json_lines(rows)).splitlines()]
    assert [line["id"] for line in lines] == expected
    assert (lines[0]["payload"], lines[0]["error"]) == ('"+1"', "=HYPERLINK(1)")
    table = list(csv.DictReader(io.StringIO(b"".join(exports.as_csv(rows)).decode())))
    assert [row["id"] for row in table] == expected
    assert (table[0]["error"], table[0]["payload"]) == ("'=HYPERLINK(1)", '"+1"')


def test_an_empty_list_is_exported_with_its_header_alone(tenant: TenantSnapshot) -> None:
    assert b"".join(exports.as_csv(exports.rows([tenant.tid], Filter()))).decode().startswith("id,tenant,")


@pytest.mark.parametrize("number", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_failures_number_survives_being_shown(number: int) -> None:
    assert failure_ids.from_text(failure_ids.to_text(number)) == number
