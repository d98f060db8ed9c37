"""Search one tenant's tasks: live tasks first, then ended ones.

Live tasks are read from the queues' indexes in Redis, queue by queue. The search text `q` finds a live task by its id,
its idempotency key, or the worker that holds it. Ended tasks are read from the audit, about a second after they end.
There, `q` finds words of the worker, error and payload, by an index of PostgreSQL's text search (the embedded
PostgreSQL has no pg_trgm). Each word of `q` matches a whole word; its last word also matches the beginning of a longer
one. The work for a page is limited. A page that reaches the limit ends early, with a cursor to continue.
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
from queues.domain import NewTask, Task, TaskStatus
from queues.engine import producer_commands, queries
from queues.engine.keys import COMMAND, PRIORITIES
from queues.models import AuditedResult
from queues.search import pagination
from queues.search.pagination import Condition, RowFilter
from tenants.domain import TenantSnapshot

# The indexes of a queue, in the order in which they are read.
WAITING: Final = ("delayed", *(f"ready:{priority}" for priority in reversed(PRIORITIES)))
INDEXES: Final = {None: ("inprog", *WAITING), TaskStatus.PENDING: WAITING, TaskStatus.IN_PROGRESS: ("inprog",)}
MAX_QUEUES = 200  # queues that one page reads
QUEUES_PER_CALL = 20
MAX_IDS = 5_000  # ids that one page reads
IDS_PER_CALL = 500
# A task's id has the time of the web process that created it; `created_ms` has the time of Redis.
MAX_CLOCK_SKEW_MS = 300_000
_CURSOR_PATTERN = re.compile(
    rf"(?:(?P<command>{COMMAND.pattern}):(?P<index>delayed|inprog|ready:[0-9]):"
    r"(?P<position>[0-9]{1,16}):(?P<id>[0-9a-f-]{36})?"
    r"|ended:(?P<ended>[0-9a-f-]*))",
    re.ASCII,
)


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions on tasks. A task must fulfil all that are given."""

    command: str | None = None
    status: TaskStatus | None = None
    created_after: datetime | None = None
    q: str | None = None

    @property
    def includes_live(self) -> bool:
        return self.status not in (TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED)

    @property
    def includes_ended(self) -> bool:
        return self.status not in (TaskStatus.PENDING, TaskStatus.IN_PROGRESS)

    def matches(self, task: Task) -> bool:
        """Return whether the task fulfils the conditions, except for `q`."""
        return (
            self.command in (None, task.spec.command)
            and self.status in (None, task.status)
            and (self.created_after is None or task.created_ms > self.created_after.timestamp() * 1000)
        )


class SearchResultPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of tasks, and the cursor of the next page.

    A page may have few or no tasks and still have a cursor, because the work for one page is limited.
    """

    tasks: list[Task]
    cursor: str | None


class SearchCursor(NamedTuple):
    """The position after which a page of live tasks begins: a task in one index of a queue."""

    command: str = ""
    index_name: str = ""
    last_position: str = "0"
    last_id: str = ""


def page(
    tenant: TenantSnapshot, query: TaskQuery, *, cursor: str | None = None, limit: int = pagination.PAGE
) -> SearchResultPage:
    """Return a page of tasks: live ones by queue and index, then ended ones, the latest first.

    Raises InvalidRequest if a condition or the cursor is not valid.
    """
    check(query)
    position, after = _decode_cursor(cursor)
    tasks: list[Task] = []
    if query.q is not None and cursor is None:
        if (by_id := _find_by_id(tenant, query.q)) is not None:
            return SearchResultPage(tasks=[by_id] if query.matches(by_id) else [], cursor=None)
        tasks += [task for task in _find_by_key(tenant, query.q) if query.matches(task)]
    if position is not None:
        seen = {task.id for task in tasks}
        live: list[Task] = []
        if query.includes_live:
            live, position = _read_live(tenant, query, position, limit - len(tasks))
        else:
            position = None
        tasks += [task for task in live if task.id not in seen]
        if position is not None:
            return SearchResultPage(tasks=tasks, cursor=":".join(position))
        if not query.includes_ended:
            return SearchResultPage(tasks=tasks, cursor=None)
        if len(tasks) >= limit:
            return SearchResultPage(tasks=tasks, cursor="ended:")
    ended, following = _read_ended(tenant, query, after, limit - len(tasks))
    cursor = None if following is None else f"ended:{pagination.encode_cursor(following)}"
    return SearchResultPage(tasks=tasks + ended, cursor=cursor)


def check(query: TaskQuery) -> None:
    """Raise InvalidRequest if the command is not valid."""
    if query.command is not None:
        validation.check_command(query.command)


def _decode_cursor(cursor: str | None) -> tuple[SearchCursor | None, pagination.PageKey | None]:
    """Return the position among the live tasks, or the last ended task of the previous page."""
    if cursor is None:
        return SearchCursor(), None
    match = _CURSOR_PATTERN.fullmatch(cursor)
    if match is None:
        raise errors.InvalidRequest(pagination.INVALID_CURSOR)
    if match["command"] is not None:
        return SearchCursor(match["command"], match["index"], match["position"], match["id"] or ""), None
    return None, pagination.decode_cursor(match["ended"]) if match["ended"] else None


def _find_by_id(tenant: TenantSnapshot, q: str) -> Task | None:
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


def _find_by_key(tenant: TenantSnapshot, q: str) -> list[Task]:
    if not validation.is_idempotency_key(q):
        return []
    matches = producer_commands.find_by_idempotency_key(
        engine(), tenant.tid, [NewTask(command="", payload="", idempotency_key=q)]
    ).run_sync()
    return [match.task for match in matches if match is not None]


def _read_live(
    tenant: TenantSnapshot, query: TaskQuery, start: SearchCursor, limit: int
) -> tuple[list[Task], SearchCursor | None]:
    """Return live tasks from `start` on, and the position to continue.

    The position is None after the last task.
    """
    tasks: list[Task] = []
    scanned = 0
    indexes = INDEXES[query.status if query.q is None else TaskStatus.IN_PROGRESS]
    since_ms = 0 if query.created_after is None else query.created_after.timestamp() * 1000 - MAX_CLOCK_SKEW_MS
    for position in _list_positions(tenant, query, indexes, start):
        if not position.index_name:  # the page has read MAX_QUEUES queues
            return tasks, position._replace(index_name=indexes[0])
        while True:
            if len(tasks) >= limit or scanned >= MAX_IDS:
                return tasks, position
            count = IDS_PER_CALL if since_ms or query.q is not None else limit - len(tasks)
            entries = queries.scan(engine(), tenant.tid, *position, limit=count).run_sync()
            if not entries:
                break
            candidates: list[str] = []
            for task_id, index_position, worker in entries:
                if len(candidates) == limit - len(tasks):
                    break
                position = position._replace(last_position=index_position, last_id=task_id)
                scanned += 1
                if query.q in (None, worker) and _created_ms(task_id) >= since_ms:
                    candidates.append(task_id)
            tasks += [
                task
                for task in queries.tasks(engine(), tenant.tid, candidates).run_sync()
                if task is not None and not task.status.is_terminal and query.matches(task)
            ]
    return tasks, None


def _list_positions(
    tenant: TenantSnapshot, query: TaskQuery, indexes: Sequence[str], start: SearchCursor
) -> Iterator[SearchCursor]:
    """Yield the beginning of each index that is not empty, from `start` on.

    After MAX_QUEUES queues, yield a position without an index, at which the next page begins.
    """
    names = [query.command] if query.command is not None else queries.list_queues(engine(), tenant.tid).run_sync()
    names = [name for name in names if name >= start.command]
    for number in range(0, len(names), QUEUES_PER_CALL):
        if number >= MAX_QUEUES:
            yield SearchCursor(names[number])
            return
        for queue in queries.stats(engine(), tenant.tid, names[number : number + QUEUES_PER_CALL]).run_sync():
            lengths = {"inprog": queue.in_progress, "delayed": queue.delayed}
            lengths |= {f"ready:{priority}": count for priority, count in enumerate(queue.ready_by_priority)}
            is_first = queue.command == start.command and start.index_name in indexes
            for index in indexes[indexes.index(start.index_name) :] if is_first else indexes:
                if is_first and index == start.index_name:
                    yield start
                elif lengths[index]:
                    yield SearchCursor(queue.command, index)


def _read_ended(
    tenant: TenantSnapshot, query: TaskQuery, after: pagination.PageKey | None, limit: int
) -> tuple[list[Task], pagination.PageKey | None]:
    """Return ended tasks from the audit, without those that are live again."""
    if query.q is not None and not pagination.split_words(query.q):
        return [], None
    keys, following = pagination.read_keys(ended_row_filter((tenant.tid,), query), after, limit)
    rows = {row.pk: row for row in AuditedResult.objects.filter(pk__in=[key.task_id for key in keys])}
    ended = [rows[key.task_id] for key in keys if key.task_id in rows]
    # The outcome of a task that became a dead letter, such as EXPIRED, differs from its status FAILED. If its dead flag
    # was cleared, it may have been replayed. Then it is among the live tasks.
    replayed = [str(row.pk) for row in ended if row.outcome != row.status and not row.is_dead]
    live = {task.id for task in queries.tasks(engine(), tenant.tid, replayed).run_sync() if task} if replayed else set()
    return [audit_reader.to_task(row, tenant) for row in ended if str(row.pk) not in live], following


def ended_row_filter(tids: Sequence[str] | None, query: TaskQuery) -> RowFilter:
    """Return the filter for the audit's rows of these tenants. None stands for all tenants."""
    indexed: list[Condition] = []
    scanned: list[Condition] = []
    if query.status in (TaskStatus.FAILED, TaskStatus.CANCELLED):
        # There is an index of the few rows that are not completed.
        indexed.append(Condition("status <> 'COMPLETED'"))
    if query.status is not None:
        scanned.append(Condition("status = %s", (query.status.value,)))
    if query.command is not None:
        condition = Condition("command = %s", (query.command,))
        (scanned if query.status in (TaskStatus.FAILED, TaskStatus.CANCELLED) else indexed).append(condition)
    if query.created_after is not None:
        # A task ends after its creation, so the index by `ended_at` narrows the rows too.
        created_after = pagination.in_utc(query.created_after)
        indexed.append(Condition("ended_at >= %s", (created_after,)))
        scanned.append(Condition("created_at > %s", (created_after,)))
    words = pagination.as_tsquery(query.q, "q") if query.q else ""
    return RowFilter(
        tids=None if tids is None else tuple(tids), indexed=tuple(indexed), scanned=tuple(scanned), words=words
    )


def _created_ms(task_id: str) -> int:
    """Return the time in the first 48 bits of a UUIDv7."""
    return int(task_id[:8] + task_id[9:13], 16)
