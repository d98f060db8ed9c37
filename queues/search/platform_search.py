"""Search the tasks of all tenants that a person may see, with limited work.

Ended tasks are read from the audit, whose index of words covers all tenants. Live tasks are read tenant by tenant, with
many calls in one round trip: by idempotency key, and by the worker that holds them. The constants below limit the work,
regardless of the number of tenants. A page reports whether a limit left out live tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from core.redis.connections import reachable_tenants
from core.redis.script_call import ScriptCall, merge_calls
from queues import validation
from queues.audit import audit_reader
from queues.current_engine import engine
from queues.domain import NewTask, Task, TaskStatus
from queues.engine import producer_commands, queries
from queues.models import AuditedResult
from queues.search import pagination, tenant_search
from queues.search.tenant_search import TaskQuery
from tenants.domain import TenantSnapshot

MAX_TENANTS = 5_000  # tenants whose live tasks are searched
MAX_QUEUES = 20_000  # queues of all these tenants
MAX_LEASES_PER_QUEUE = 500
MAX_LEASES = 20_000  # leases of all these queues
# Calls in one round trip. Each script is short, and Redis serves other clients between them.
CALLS_PER_ROUND_TRIP = 200

R = TypeVar("R")
T = TypeVar("T")


class PlatformSearchResult(NamedTuple):
    tid: str
    task: Task


class PlatformSearchPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of tasks, the live ones first."""

    results: list[PlatformSearchResult]
    cursor: str | None  # of the next page, which has ended tasks only
    is_cut: bool  # a limit left out some live tasks


def page(
    tids: Sequence[str] | None,
    live_tids: Sequence[str],
    query: TaskQuery,
    *,
    cursor: str | None = None,
    limit: int = pagination.PAGE,
) -> PlatformSearchPage:
    """Return tasks that match `query.q`: live tasks of `live_tids`, then ended tasks of `tids`.

    At most MAX_TENANTS of `live_tids` are searched. If `tids` is None, ended tasks of all tenants are included.
    """
    assert query.q is not None
    tenant_search.check(query)
    results: list[PlatformSearchResult] = []
    reachable = reachable_tenants(live_tids[:MAX_TENANTS])
    is_cut = len(live_tids) > len(reachable)
    if cursor is None:
        results = _find_by_key(reachable, query)
        held, is_held_cut = _find_held(reachable, query)
        results += [result for result in held if result not in results]
        is_cut = is_cut or is_held_cut
    if not query.includes_ended or not pagination.split_words(query.q):
        return PlatformSearchPage(results=results[:limit], cursor=None, is_cut=is_cut or len(results) > limit)
    seen = {result.task.id for result in results}
    after = pagination.decode_cursor(cursor) if cursor else None
    keys, following = pagination.read_keys(tenant_search.ended_row_filter(tids, query), after, limit)
    rows = {row.pk: row for row in AuditedResult.objects.filter(pk__in=[key.task_id for key in keys])}
    ended = [rows[key.task_id] for key in keys if key.task_id in rows]
    replayed_ids = _find_replayed(ended)
    results += [
        PlatformSearchResult(
            str(row.tenant_id), audit_reader.to_task(row, TenantSnapshot(tid=str(row.tenant_id), slug=""))
        )
        for row in ended
        if str(row.pk) not in seen | replayed_ids
    ]
    return PlatformSearchPage(
        results=results, cursor=pagination.encode_cursor(following) if following else None, is_cut=is_cut
    )


def _find_by_key(tids: Sequence[str], query: TaskQuery) -> list[PlatformSearchResult]:
    """Return each tenant's task with this idempotency key."""
    assert query.q is not None
    if not validation.is_idempotency_key(query.q):
        return []
    key = [NewTask(command="", payload="", idempotency_key=query.q)]
    replies = _run_all([producer_commands.find_by_idempotency_key(engine(), tid, key) for tid in tids])
    results = [
        PlatformSearchResult(tid, match.task)
        for tid, matches in zip(tids, replies, strict=True)
        for match in matches
        if match
    ]
    return [result for result in results if query.matches(result.task)]


def _find_held(tids: Sequence[str], query: TaskQuery) -> tuple[list[PlatformSearchResult], bool]:
    """Return the tasks that a worker of this name holds, and whether a limit left out some."""
    if query.status not in (None, TaskStatus.IN_PROGRESS):
        return [], False
    if query.command is not None:
        queues = [(tid, query.command) for tid in tids]
    else:
        replies = _run_all([queries.list_queues(engine(), tid) for tid in tids])
        queues = [(tid, name) for tid, names in zip(tids, replies, strict=True) for name in names]
    is_cut = len(queues) > MAX_QUEUES
    scanned, held = 0, defaultdict[str, list[str]](list)
    for batch in _split(queues[:MAX_QUEUES], CALLS_PER_ROUND_TRIP):
        scans = _run_all(
            [queries.scan(engine(), tid, command, "inprog", limit=MAX_LEASES_PER_QUEUE) for tid, command in batch]
        )
        for (tid, _), leases in zip(batch, scans, strict=True):
            scanned += len(leases)
            is_cut = is_cut or len(leases) == MAX_LEASES_PER_QUEUE
            held[tid] += [task_id for task_id, _, worker in leases if worker == query.q]
        if scanned > MAX_LEASES:
            is_cut = True
            break
    is_cut = is_cut or any(len(task_ids) > pagination.PAGE for task_ids in held.values())
    ids = {tid: task_ids[: pagination.PAGE] for tid, task_ids in held.items() if task_ids}
    return [result for result in _read_tasks(ids) if query.matches(result.task)], is_cut


def _find_replayed(ended: Sequence[AuditedResult]) -> set[str]:
    """Return the ids of tasks that are live again because they were replayed.

    They became dead letters: their outcome, such as EXPIRED, differs from their status FAILED.
    """
    maybe_replayed = defaultdict[str, list[str]](list)
    for row in ended:
        if row.outcome != row.status and not row.is_dead:
            maybe_replayed[str(row.tenant_id)].append(str(row.pk))
    return {result.task.id for result in _read_tasks(maybe_replayed)}


def _read_tasks(ids: Mapping[str, Sequence[str]]) -> list[PlatformSearchResult]:
    """Read live tasks of the reachable tenants. `ids` maps tenants to task ids."""
    ids = {tid: ids[tid] for tid in reachable_tenants(ids)}
    replies = _run_all([queries.tasks(engine(), tid, task_ids) for tid, task_ids in ids.items()])
    return [PlatformSearchResult(tid, task) for tid, tasks in zip(ids, replies, strict=True) for task in tasks if task]


def _run_all(calls: Sequence[ScriptCall[R]]) -> list[R]:
    """Run the calls, many in one round trip, and return their results in order."""
    return [
        result
        for batch in _split(calls, CALLS_PER_ROUND_TRIP)
        for result in merge_calls(engine().runner, batch).run_sync()
    ]


def _split(items: Sequence[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
