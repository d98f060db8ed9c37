"""Find, replay and delete dead letters. Lists are read from PostgreSQL, never from Redis.

The drain sets the flag `is_dead` of a row when its task becomes a dead letter, and clears it when the task is replayed
or removed. So a list is about a second behind Redis. The functions of this module clear the flag at once.
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
from queues.batch import convert_each, merge_in_order
from queues.domain import Task
from queues.models import AuditedResult
from queues.search import pagination
from queues.search.pagination import Condition, RowFilter
from tenants.domain import TenantSnapshot

# The tenants to read. None: all tenants, for the platform's own operators.
TenantIds = Sequence[str] | None
PAYLOAD_CHARS = 200
COUNT_MS = 3_000
COUNT_LIMIT = 10_000_000

Words = Annotated[str, Meta(min_length=1, max_length=200)]


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True):
    """Conditions on dead letters. A dead letter must fulfil all that are given."""

    command: str | None = None
    failure: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}(?!\n)$", description="Id of a failure group.")] | None = None
    text: Annotated[Words, Meta(description="Words of error, payload or worker.")] | None = None
    error: Annotated[Words, Meta(description="Words of the error.")] | None = None
    died_after: Annotated[datetime, Meta(tz=True)] | None = None
    died_before: Annotated[datetime, Meta(tz=True)] | None = None
    # Whole numbers. JSON may write them as 3 or 3.0.
    deliveries_from: Annotated[float, Meta(multiple_of=1, ge=0, le=2**31 - 1)] | None = None
    deliveries_to: Annotated[float, Meta(multiple_of=1, ge=0, le=2**31 - 1)] | None = None
    json_path: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=500,
                description="SQL/JSON path that matches a value in the payload other than false and null.",
                examples=["$.customer.id == 42", '$.items[*] ? (@.sku starts with "A")'],
            ),
        ]
        | None
    ) = None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter in a list, with the beginning of its payload."""

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
    """A page of dead letters, and the cursor of the next page.

    A page may have few or no rows and still have a cursor, because the work for one page is limited.
    """

    letters: list[DeadLetter]
    cursor: str | None


def page(
    tids: TenantIds, letter_filter: Filter, *, cursor: str | None = None, limit: int = pagination.PAGE
) -> DeadLetterPage:
    """Return a page of the matching dead letters, the newest first, with limited work."""
    after = pagination.decode_cursor(cursor) if cursor else None
    keys, following = pagination.read_keys(to_row_filter(tids, letter_filter), after, limit)
    return DeadLetterPage(letters=read_letters(keys), cursor=pagination.encode_cursor(following) if following else None)


def count(tids: TenantIds, letter_filter: Filter, *, milliseconds: int = COUNT_MS) -> int | None:
    """Return the number of matching dead letters, or None if counting takes too long."""
    return pagination.count(to_row_filter(tids, letter_filter), at_most=COUNT_LIMIT, milliseconds=milliseconds)


def to_row_filter(
    tids: TenantIds, letter_filter: Filter, *, until: datetime | None = None, include_no_longer_dead: bool = False
) -> RowFilter:
    """Return the filter for the rows of matching dead letters in the audit.

    With `until`, only tasks that died up to this time. With `include_no_longer_dead`, also tasks that became dead
    letters and were replayed or removed since. Raises InvalidRequest for an invalid JSON path, and for text without a
    letter or digit, which would match every row.
    """
    if letter_filter.command is not None:
        validation.check_command(letter_filter.command)
    scanned: list[Condition] = []
    if include_no_longer_dead:
        # There is an index of the few rows that are not completed.
        indexed = [Condition("status <> 'COMPLETED'")]
        scanned += [
            Condition("status = 'FAILED' AND outcome <> 'FAILED'"),
            *_command_conditions(letter_filter.command),
        ]
    else:
        indexed = [Condition("is_dead"), *_command_conditions(letter_filter.command)]
    if letter_filter.failure is not None:
        try:
            condition = Condition("fingerprint = %s", (failure_ids.from_text(letter_filter.failure),))
        except ValueError:
            raise errors.InvalidRequest("failure: must be 16 hexadecimal digits") from None
        # The index of fingerprints begins with the command.
        (scanned if include_no_longer_dead or letter_filter.command is None else indexed).append(condition)
    for sql, value in (
        ("ended_at > %s", letter_filter.died_after),
        ("ended_at < %s", letter_filter.died_before),
        ("ended_at <= %s", until),
    ):
        if value is not None:
            indexed.append(Condition(sql, (pagination.in_utc(value),)))
    for sql, number in (
        ("deliveries >= %s", letter_filter.deliveries_from),
        ("deliveries <= %s", letter_filter.deliveries_to),
    ):
        if number is not None:
            scanned.append(Condition(sql, (number,)))
    if letter_filter.error is not None:
        words = (pagination.as_tsquery(letter_filter.error, "error"),)
        scanned.append(Condition("queues_words('', '', error, '') @@ to_tsquery('simple', %s)", words))
    if letter_filter.json_path is not None:
        _check_json_path(letter_filter.json_path)
        scanned.append(Condition("queues_finds(payload, %s::jsonpath)", (letter_filter.json_path,)))
    tsqueries = [
        pagination.as_tsquery(text, name)
        for name, text in (("error", letter_filter.error), ("text", letter_filter.text))
        if text is not None
    ]
    return RowFilter(tids=_to_tuple(tids), indexed=tuple(indexed), scanned=tuple(scanned), words=" & ".join(tsqueries))


def read_letters(keys: Sequence[pagination.PageKey]) -> list[DeadLetter]:
    """Return the dead letters with these keys, in the order of the keys."""
    ids = [key.task_id for key in keys]
    rows = AuditedResult.objects.filter(pk__in=ids).annotate(payload_start=Left("payload", PAYLOAD_CHARS))
    by_id = {row["task_id"]: row for row in rows.values(*_COLUMNS, "payload_start")}
    return [_to_letter(by_id[task_id]) for task_id in ids if task_id in by_id]


def replay(
    tenant: TenantSnapshot, task_ids: Sequence[str], payloads: Mapping[str, str] | None = None
) -> list[Task | errors.CodeqError]:
    """Replay at most 1,000 dead letters, and return each task or its error.

    `payloads` maps ids of tasks to new payloads (JSON text). The error is NotDead for a task that is not a
    dead letter any more, and TaskNotFound for a task that Redis does not have. Raises InvalidRequest or
    PayloadTooLarge, without replaying any task, if a payload is not valid.
    """
    new_payloads = {task_id: _compact(tenant, payload) for task_id, payload in (payloads or {}).items()}
    specs = []
    for task_id in task_ids if new_payloads else ():
        spec = None
        if task_id in new_payloads:
            with contextlib.suppress(errors.TaskNotFound):  # the replay returns this error
                spec = msgspec.structs.replace(
                    selectors.task(tenant, task_id).run_sync().spec, payload=new_payloads[task_id]
                )
        specs.append(spec)
    positions = _read_positions(tenant.tid, task_ids)
    results = services.replay(tenant, task_ids, specs).run_sync()
    _clear_flags_of_no_longer_dead(tenant.tid, positions, task_ids, results)
    return results


def delete(tenant: TenantSnapshot, task_ids: Sequence[str]) -> list[errors.CodeqError | None]:
    """Delete dead letters from Redis, and return the error of each or None.

    Their rows in the audit are kept.
    """
    valid, refused = convert_each(task_ids, validation.check_id)
    positions = _read_positions(tenant.tid, valid)
    results = services.purge_dead(tenant, valid).run_sync()
    _clear_flags_of_no_longer_dead(tenant.tid, positions, valid, results)
    return merge_in_order(refused, results)


def clear_dead_flags(tid: str, positions: Mapping[UUID, int]) -> None:
    """Clear the dead flag of these tasks, unless their row's position has changed.

    A changed position shows that the drain has stored a later event, which may be another death.
    """
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


_COLUMNS = (
    "task_id", "tenant_id", "command", "priority", "error", "fingerprint", "deliveries", "attempts", "max_attempts",
    "worker", "created_at", "ended_at",
)  # fmt: skip


def _to_letter(row: Mapping[str, Any]) -> DeadLetter:
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


def _read_positions(tid: str, task_ids: Sequence[str]) -> dict[str, int]:
    """Return the stream positions of these dead letters in the audit.

    Callers call this before they change the tasks.
    """
    ids = [UUID(task_id) for task_id in task_ids if validation.is_id(task_id)]
    rows = AuditedResult.objects.filter(pk__in=ids, tenant_id=tid, is_dead=True)
    return {str(task_id): position for task_id, position in rows.values_list("task_id", "position")}


def _clear_flags_of_no_longer_dead(
    tid: str, positions: Mapping[str, int], task_ids: Sequence[str], results: Sequence[object]
) -> None:
    """Clear the dead flag of the tasks that are not dead letters any more.

    These are the tasks that this call has replayed or deleted, and those with the error NotDead or TaskNotFound.
    """
    no_longer_dead = {
        UUID(task_id): positions[task_id]
        for task_id, result in zip(task_ids, results, strict=True)
        if task_id in positions
        and (not isinstance(result, errors.CodeqError) or isinstance(result, errors.NotDead | errors.TaskNotFound))
    }
    clear_dead_flags(tid, no_longer_dead)


def _command_conditions(command: str | None) -> list[Condition]:
    return [] if command is None else [Condition("command = %s", (command,))]


def _to_tuple(tids: TenantIds) -> tuple[str, ...] | None:
    return None if tids is None else tuple(tids)


def _check_json_path(path: str) -> None:
    """Raise InvalidRequest with PostgreSQL's message if the JSON path is not valid."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT %s::jsonpath", [path])
    except (DataError, ProgrammingError) as error:
        raise errors.InvalidRequest(f"jsonPath: {str(error).splitlines()[0]}") from None
