"""Dead letters: found, replayed, deleted. Lists come from PostgreSQL, never from Redis.

The audit marks a dead letter (`is_dead`) when the stream tells of its death, and unmarks it when the stream tells that
it was replayed or removed; so a list is as late as the drain, a second. What is done here is unmarked at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from django.db import DataError, ProgrammingError, connection, transaction
from django.db.models.functions import Left
from msgspec import Meta

from core import errors
from queues import failure_ids, json_payloads, selectors, services, validation
from queues.domain import Task
from queues.models import AuditedResult
from queues.search import pagination
from queues.search.pagination import Condition, RowFilter
from tenants.domain import TenantSnapshot

# The tenants a question is about: None = all there are, for the platform's own operators.
Tids = Sequence[str] | None
SHOWN_CHARS = 200
COUNT_MS = 3_000
COUNT_LIMIT = 10_000_000

Words = Annotated[str, Meta(min_length=1, max_length=200)]


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    """Which dead letters. What is not said does not matter."""

    command: str | None = None
    failure: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}(?!\n)$", description="The number of a group.")] | None = None
    text: Annotated[Words, Meta(description="Words of error, payload or worker.")] | None = None
    error: Annotated[Words, Meta(description="Words of the error.")] | None = None
    died_after: Annotated[datetime, Meta(tz=True)] | None = None
    died_before: Annotated[datetime, Meta(tz=True)] | None = None
    # Whole numbers, however JSON writes them.
    deliveries_from: Annotated[float, Meta(multiple_of=1, ge=0, le=2**31 - 1)] | None = None
    deliveries_to: Annotated[float, Meta(multiple_of=1, ge=0, le=2**31 - 1)] | None = None
    json_path: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=500,
                description="SQL/JSON path that finds something in the payload other than false and null.",
                examples=["$.customer.id == 42", '$.items[*] ? (@.sku starts with "A")'],
            ),
        ]
        | None
    ) = None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter as lists show it."""

    id: str
    tid: str
    command: str
    priority: int
    error: str
    failure: str
    deliveries: int
    attempts: int
    max_attempts: int
    worker: str
    payload_start: str
    created_at: datetime
    died_at: datetime


class DeadLetterPage(msgspec.Struct, frozen=True, kw_only=True):
    """`cursor` leads to the next page. A page may be short, even empty, and still lead on: it has looked at enough."""

    letters: list[DeadLetter]
    cursor: str | None


def page(tids: Tids, asked: Filter, *, cursor: str | None = None, limit: int = pagination.PAGE) -> DeadLetterPage:
    """The next dead letters, the newest first: bounded work, whatever is asked."""
    after = pagination.from_text(cursor) if cursor else None
    found, following = pagination.keys(which(tids, asked), after, limit)
    return DeadLetterPage(letters=letters(found), cursor=pagination.to_text(following) if following else None)


def count(tids: Tids, asked: Filter, *, milliseconds: int = COUNT_MS) -> int | None:
    """How many there are; None if that would take too long to say."""
    return pagination.count(which(tids, asked), at_most=COUNT_LIMIT, milliseconds=milliseconds)


def which(tids: Tids, asked: Filter, *, until: datetime | None = None, were: bool = False) -> RowFilter:
    """The rows that a filter means; `until`: those that were dead by then; `were`: also if they are no more.

    InvalidRequest for a JSON path that is none, and for words without a letter or digit, which would mean everything.
    """
    if asked.command is not None:
        validation.check_command(asked.command)
    where: list[Condition] = []
    if were:
        # An index knows what did not complete, and it is little.
        within = [Condition("status <> 'COMPLETED'")]
        where += [Condition("status = 'FAILED' AND outcome <> 'FAILED'"), *_command(asked.command)]
    else:
        within = [Condition("is_dead"), *_command(asked.command)]
    if asked.failure is not None:
        try:
            condition = Condition("fingerprint = %s", (failure_ids.from_text(asked.failure),))
        except ValueError:
            raise errors.InvalidRequest("failure: 16 hex digits") from None
        # The index that knows failures knows them by command.
        (where if were or asked.command is None else within).append(condition)
    for sql, value in (
        ("ended_at > %s", asked.died_after),
        ("ended_at < %s", asked.died_before),
        ("ended_at <= %s", until),
    ):
        if value is not None:
            within.append(Condition(sql, (pagination.in_utc(value),)))
    for sql, number in (("deliveries >= %s", asked.deliveries_from), ("deliveries <= %s", asked.deliveries_to)):
        if number is not None:
            where.append(Condition(sql, (number,)))
    if asked.error is not None:
        words = (pagination.as_tsquery(asked.error, "error"),)
        where.append(Condition("queues_words('', '', error, '') @@ to_tsquery('simple', %s)", words))
    if asked.json_path is not None:
        _check_path(asked.json_path)
        where.append(Condition("queues_finds(payload, %s::jsonpath)", (asked.json_path,)))
    said = [
        pagination.as_tsquery(text, name)
        for name, text in (("error", asked.error), ("text", asked.text))
        if text is not None
    ]
    return RowFilter(tids=_tuple(tids), within=tuple(within), where=tuple(where), words=" & ".join(said))


def letters(found: Sequence[pagination.PageKey]) -> list[DeadLetter]:
    """What lists show of these rows, in their order."""
    ids = [key.task_id for key in found]
    rows = AuditedResult.objects.filter(pk__in=ids).annotate(payload_start=Left("payload", SHOWN_CHARS))
    by_id = {row["task_id"]: row for row in rows.values(*_SHOWN, "payload_start")}
    return [_letter(by_id[task_id]) for task_id in ids if task_id in by_id]


def replay(
    tenant: TenantSnapshot, task_ids: Sequence[str], payloads: Mapping[str, str] | None = None
) -> list[Task | errors.CodeqError]:
    """Bring dead letters back in line, some perhaps with a mended payload (JSON text); what became of each.

    At most 1,000; more are a bulk job. NotDead for what is none any more, TaskNotFound for what is gone.
    """
    new = {task_id: _compact(tenant, payload) for task_id, payload in (payloads or {}).items()}
    specs = []
    for task_id in task_ids if new else ():
        spec = None
        if task_id in new:
            with contextlib.suppress(errors.TaskNotFound):  # the replay will say so
                spec = msgspec.structs.replace(selectors.task(tenant, task_id).run_sync().spec, payload=new[task_id])
        specs.append(spec)
    positions = _positions(tenant.tid, task_ids)
    answers = services.replay(tenant, task_ids, specs).run_sync()
    _unmark(tenant.tid, positions, task_ids, answers)
    return answers


def delete(tenant: TenantSnapshot, task_ids: Sequence[str]) -> list[errors.CodeqError | None]:
    """Delete dead letters for good; the audit of their attempts stays. What was wrong with each, or None."""
    valid = [task_id for task_id in task_ids if validation.is_id(task_id)]
    positions = _positions(tenant.tid, valid)
    wrong = services.purge_dead(tenant, valid).run_sync()
    _unmark(tenant.tid, positions, valid, wrong)
    answers = iter(wrong)
    return [next(answers) if validation.is_id(task_id) else errors.TaskNotFound() for task_id in task_ids]


def forget(tid: str, positions: Mapping[UUID, int]) -> None:
    """Redis says that these are dead no more: unmark them, unless the audit has heard of a later death since."""
    if not positions:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE queues_auditedresult AS audited SET is_dead = false "
            "FROM unnest(%s::uuid[], %s::bigint[]) AS seen (task_id, position) "
            "WHERE audited.task_id = seen.task_id AND audited.position = seen.position "
            "AND audited.tenant_id = %s AND audited.is_dead",
            [list(positions), list(positions.values()), tid],
        )


_SHOWN = (
    "task_id", "tenant_id", "command", "priority", "error", "fingerprint", "deliveries", "attempts", "max_attempts",
    "worker", "created_at", "ended_at",
)  # fmt: skip


def _letter(row: Mapping[str, Any]) -> DeadLetter:
    return DeadLetter(
        id=str(row["task_id"]),
        tid=row["tenant_id"],
        command=row["command"],
        priority=row["priority"],
        error=row["error"],
        failure=failure_ids.to_text(row["fingerprint"] or 0),
        deliveries=row["deliveries"],
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        worker=row["worker"],
        payload_start=row["payload_start"],
        created_at=row["created_at"],
        died_at=row["ended_at"],
    )


def _compact(tenant: TenantSnapshot, payload: str) -> str:
    try:
        raw = msgspec.json.decode(payload, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"payload: not JSON: {error}") from None
    text = json_payloads.compact(raw, "payload").decode()
    validation.check_payload(tenant, text)
    return text


def _positions(tid: str, task_ids: Sequence[str]) -> dict[str, int]:
    """Which death of each the audit shows, before anything is done about it."""
    ids = [UUID(task_id) for task_id in task_ids if validation.is_id(task_id)]
    shown = AuditedResult.objects.filter(pk__in=ids, tenant_id=tid, is_dead=True)
    return {str(task_id): position for task_id, position in shown.values_list("task_id", "position")}


def _unmark(tid: str, positions: Mapping[str, int], task_ids: Sequence[str], answers: Sequence[object]) -> None:
    """Whatever the answer was (done, not dead, not there): it is no dead letter now."""
    over = {
        UUID(task_id): positions[task_id]
        for task_id, answer in zip(task_ids, answers, strict=True)
        if task_id in positions
        and (not isinstance(answer, errors.CodeqError) or isinstance(answer, errors.NotDead | errors.TaskNotFound))
    }
    forget(tid, over)


def _command(command: str | None) -> list[Condition]:
    return [] if command is None else [Condition("command = %s", (command,))]


def _tuple(tids: Tids) -> tuple[str, ...] | None:
    return None if tids is None else tuple(tids)


def _check_path(path: str) -> None:
    """What PostgreSQL says against a JSON path is the asker's to hear."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT %s::jsonpath", [path])
    except (DataError, ProgrammingError) as error:
        raise errors.InvalidRequest(f"jsonPath: {str(error).splitlines()[0]}") from None
