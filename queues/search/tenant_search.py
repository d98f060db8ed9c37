"""Finding a tenant's tasks: by id, by idempotency key, by words, by what is known of them. Live ones first, then ended.

Live tasks are walked queue by queue in Redis' own indexes; what has ended is found in the audit, and so a second after
it ended. Words are those of an ended task's worker, error and payload, from an index of PostgreSQL's own text search
(the embedded PostgreSQL has no pg_trgm): whole words, the last one also by its beginning. A live task is found by id,
by idempotency key, or by the worker that holds it. No page does more than a bounded piece of all that; it ends early
where it must, and says where to go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

from core import errors
from queues import validation
from queues.audit import audit_reader
from queues.current_engine import engine
from queues.domain import NewTask, Status, Task
from queues.engine import producer_commands, queries
from queues.engine.keys import COMMAND, PRIORITIES
from queues.models import AuditedResult
from queues.search import pagination
from queues.search.pagination import Condition, RowFilter
from tenants.domain import TenantSnapshot

WAITING: Final = ("delayed", *(f"ready:{priority}" for priority in reversed(PRIORITIES)))
PLACES: Final = {None: ("inprog", *WAITING), Status.PENDING: WAITING, Status.IN_PROGRESS: ("inprog",)}
# Queues that one page looks into, how many of them at once, and ids.
QUEUES = 200
QUEUES_AT_ONCE = 20
IDS = 5_000
IDS_AT_ONCE = 500
# A task's id bears the time of the web process that made it, its record that of Redis.
SKEW_MS = 300_000
_cursor = re.compile(
    rf"(?:(?P<command>{COMMAND.pattern}):(?P<place>delayed|inprog|ready:[0-9]):(?P<at>[0-9]{{1,16}}):(?P<after>[0-9a-f-]{{36}})?"
    r"|ended:(?P<ended>[0-9a-f-]*))",
    re.ASCII,
)


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the tasks. What is not said does not matter."""

    command: str | None = None
    status: Status | None = None
    created_after: datetime | None = None
    q: str | None = None

    @property
    def is_live_asked(self) -> bool:
        return self.status not in (Status.COMPLETED, Status.FAILED, Status.CANCELLED)

    @property
    def is_ended_asked(self) -> bool:
        return self.status not in (Status.PENDING, Status.IN_PROGRESS)

    def fits(self, task: Task) -> bool:
        """Whether a task is one of those, its words aside."""
        return (
            self.command in (None, task.spec.command)
            and self.status in (None, task.status)
            and (self.created_after is None or task.created_ms > self.created_after.timestamp() * 1000)
        )


class SearchResultPage(msgspec.Struct, frozen=True, kw_only=True):
    """`cursor` leads to the next page. A page may be short, even empty, and still lead on: it has looked at enough."""

    tasks: list[Task]
    cursor: str | None


class SearchCursor(NamedTuple):
    """Where in the live tasks a page begins: behind `after` in one index of a queue."""

    command: str = ""
    place: str = ""
    at: str = "0"
    after: str = ""


def page(
    tenant: TenantSnapshot, asked: TaskQuery, *, cursor: str | None = None, limit: int = pagination.PAGE
) -> SearchResultPage:
    """The next tasks: live ones by queue and place, then ended ones, the latest first."""
    check(asked)
    spot, after = _read(cursor)
    found: list[Task] = []
    if asked.q is not None and cursor is None:
        if (by_id := _by_id(tenant, asked.q)) is not None:
            return SearchResultPage(tasks=[by_id] if asked.fits(by_id) else [], cursor=None)
        found += [task for task in _by_key(tenant, asked.q) if asked.fits(task)]
    if spot is not None:
        seen = {task.id for task in found}
        live, spot = _live(tenant, asked, spot, limit - len(found)) if asked.is_live_asked else ([], None)
        found += [task for task in live if task.id not in seen]
        if spot is not None:
            return SearchResultPage(tasks=found, cursor=":".join(spot))
        if not asked.is_ended_asked:
            return SearchResultPage(tasks=found, cursor=None)
        if len(found) >= limit:
            return SearchResultPage(tasks=found, cursor="ended:")
    over, following = _ended(tenant, asked, after, limit - len(found))
    cursor = None if following is None else f"ended:{pagination.to_text(following)}"
    return SearchResultPage(tasks=found + over, cursor=cursor)


def check(asked: TaskQuery) -> None:
    """InvalidRequest for what no task can be."""
    if asked.command is not None:
        validation.check_command(asked.command)


def _read(cursor: str | None) -> tuple[SearchCursor | None, pagination.PageKey | None]:
    """Where among the live ones to go on, or behind which ended one."""
    if cursor is None:
        return SearchCursor(), None
    match = _cursor.fullmatch(cursor)
    if match is None:
        raise errors.InvalidRequest("cursor: not one that a page gave")
    if match["command"] is not None:
        return SearchCursor(match["command"], match["place"], match["at"], match["after"] or ""), None
    return None, pagination.from_text(match["ended"]) if match["ended"] else None


def _by_id(tenant: TenantSnapshot, q: str) -> Task | None:
    try:
        task_id = str(UUID(q))
    except ValueError:
        return None
    if task_id != q.lower():
        return None
    [live] = queries.tasks(engine(), tenant.tid, [task_id]).run_sync()
    if live is not None:
        return live
    try:
        return audit_reader.audited_task(tenant, task_id)
    except errors.TaskNotFound:
        return None


def _by_key(tenant: TenantSnapshot, q: str) -> list[Task]:
    if not validation.is_idempotency_key(q):
        return []
    known = producer_commands.find_by_idempotency_key(
        engine(), tenant.tid, [NewTask(command="", payload="", idempotency_key=q)]
    ).run_sync()
    return [item.task for item in known if item is not None]


def _live(
    tenant: TenantSnapshot, asked: TaskQuery, start: SearchCursor, room: int
) -> tuple[list[Task], SearchCursor | None]:
    """What is in Redis and has not ended; and where to go on, if that is not all."""
    found: list[Task] = []
    looked = 0
    places = PLACES[asked.status if asked.q is None else Status.IN_PROGRESS]
    since_ms = 0 if asked.created_after is None else asked.created_after.timestamp() * 1000 - SKEW_MS
    for spot in _spots(tenant, asked, places, start):
        if not spot.place:  # a page has looked into enough queues
            return found, spot._replace(place=places[0])
        while True:
            if len(found) >= room or looked >= IDS:
                return found, spot
            wanted = IDS_AT_ONCE if since_ms or asked.q is not None else room - len(found)
            ids = queries.scan(engine(), tenant.tid, *spot, limit=wanted).run_sync()
            if not ids:
                break
            meant: list[str] = []
            for task_id, at, worker in ids:
                if len(meant) == room - len(found):
                    break
                spot = spot._replace(at=at, after=task_id)
                looked += 1
                if asked.q in (None, worker) and _made_ms(task_id) >= since_ms:
                    meant.append(task_id)
            found += [
                task
                for task in queries.tasks(engine(), tenant.tid, meant).run_sync()
                if task is not None and not task.status.is_terminal and asked.fits(task)
            ]
    return found, None


def _spots(
    tenant: TenantSnapshot, asked: TaskQuery, places: Sequence[str], start: SearchCursor
) -> Iterator[SearchCursor]:
    """The indexes that hold something, in order, from `start` on. Without a place: where the next page begins."""
    names = [asked.command] if asked.command is not None else queries.list_queues(engine(), tenant.tid).run_sync()
    names = [name for name in names if name >= start.command]
    for number in range(0, len(names), QUEUES_AT_ONCE):
        if number >= QUEUES:
            yield SearchCursor(names[number])
            return
        for queue in queries.stats(engine(), tenant.tid, names[number : number + QUEUES_AT_ONCE]).run_sync():
            held = {"inprog": queue.in_progress, "delayed": queue.delayed}
            held |= {f"ready:{priority}": count for priority, count in enumerate(queue.ready_by_priority)}
            is_first = queue.command == start.command and start.place in places
            for place in places[places.index(start.place) :] if is_first else places:
                if is_first and place == start.place:
                    yield start
                elif held[place]:
                    yield SearchCursor(queue.command, place)


def _ended(
    tenant: TenantSnapshot, asked: TaskQuery, after: pagination.PageKey | None, room: int
) -> tuple[list[Task], pagination.PageKey | None]:  # fmt: skip
    """What the audit knows, but for those that live again."""
    if asked.q is not None and not pagination.words_of(asked.q):
        return [], None
    keys, following = pagination.keys(ended((tenant.tid,), asked), after, room)
    rows = {row.pk: row for row in AuditedResult.objects.filter(pk__in=[key.task_id for key in keys])}
    found = [rows[key.task_id] for key in keys if key.task_id in rows]
    # Dead once, and no dead letter now: replayed perhaps, and then it is found among the live.
    perhaps = [str(row.pk) for row in found if row.outcome != row.status and not row.is_dead]
    live = {task.id for task in queries.tasks(engine(), tenant.tid, perhaps).run_sync() if task} if perhaps else set()
    return [audit_reader.task_of(row, tenant) for row in found if str(row.pk) not in live], following


def ended(tids: Sequence[str] | None, asked: TaskQuery) -> RowFilter:
    """What the audit knows of these tasks, of these tenants (None = of all)."""
    within: list[Condition] = []
    where: list[Condition] = []
    if asked.status in (Status.FAILED, Status.CANCELLED):
        # Few end so, and have an index of their own.
        within.append(Condition("status <> 'COMPLETED'"))
    if asked.status is not None:
        where.append(Condition("status = %s", (asked.status.value,)))
    if asked.command is not None:
        condition = Condition("command = %s", (asked.command,))
        (where if asked.status in (Status.FAILED, Status.CANCELLED) else within).append(condition)
    if asked.created_after is not None:
        # Nothing ends before it is created, so the order of ends narrows it too.
        created_after = pagination.in_utc(asked.created_after)
        within.append(Condition("ended_at >= %s", (created_after,)))
        where.append(Condition("created_at > %s", (created_after,)))
    words = pagination.as_tsquery(asked.q, "q") if asked.q else ""
    return RowFilter(tids=None if tids is None else tuple(tids), within=tuple(within), where=tuple(where), words=words)


def _made_ms(task_id: str) -> int:
    """When an id was made: the first 48 bits of a UUIDv7."""
    return int(task_id[:8] + task_id[9:13], 16)
