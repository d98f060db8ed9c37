"""Finding tasks where it is not known whose they are: of all the tenants a person sees, with bounded work.

Ended tasks are found in the audit, whose index of words knows all tenants at once. Live ones are asked for tenant by
tenant, many in one round trip: by idempotency key, and by the worker that has them in progress. However many tenants
there are, no more is looked at than is said here, and the page tells whether that was all.
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
from queues.domain import NewTask, Status, Task
from queues.engine import producer_commands, queries
from queues.models import AuditedResult
from queues.search import pagination, tenant_search
from queues.search.tenant_search import TaskQuery
from tenants.domain import TenantSnapshot

# Tenants whose live tasks are looked at, their queues, the leases of one queue, and of all.
TENANTS = 5_000
QUEUES = 20_000
LEASES = 500
ALL_LEASES = 20_000
# Scripts in one round trip, each of them short: others are served between them.
TOGETHER = 200

R = TypeVar("R")
T = TypeVar("T")


class PlatformSearchResult(NamedTuple):
    tid: str
    task: Task


class PlatformSearchPage(msgspec.Struct, frozen=True, kw_only=True):
    """`is_cut`: there were more live tasks to look at than one page may. `cursor` leads on among those that ended."""

    found: list[PlatformSearchResult]
    cursor: str | None
    is_cut: bool


def page(
    tids: Sequence[str] | None,
    live: Sequence[str],
    asked: TaskQuery,
    *,
    cursor: str | None = None,
    limit: int = pagination.PAGE,
) -> PlatformSearchPage:
    """Tasks of these tenants (None = of all there are) that fit the words of `asked`, live ones first.

    `live`: the tenants whose live tasks are looked at, TENANTS of them at most.
    """
    assert asked.q is not None
    tenant_search.check(asked)
    found: list[PlatformSearchResult] = []
    there = reachable_tenants(live[:TENANTS])
    is_cut = len(live) > len(there)
    if cursor is None:
        found = _by_key(there, asked)
        held, is_more = _held(there, asked)
        found += [each for each in held if each not in found]
        is_cut = is_cut or is_more
    if not asked.is_ended_asked or not pagination.words_of(asked.q):
        return PlatformSearchPage(found=found[:limit], cursor=None, is_cut=is_cut or len(found) > limit)
    seen = {each.task.id for each in found}
    after = pagination.from_text(cursor) if cursor else None
    keys, following = pagination.keys(tenant_search.ended(tids, asked), after, limit)
    rows = {row.pk: row for row in AuditedResult.objects.filter(pk__in=[key.task_id for key in keys])}
    ended = [rows[key.task_id] for key in keys if key.task_id in rows]
    alive = _alive(ended)
    found += [
        PlatformSearchResult(
            str(row.tenant_id), audit_reader.task_of(row, TenantSnapshot(tid=str(row.tenant_id), slug=""))
        )
        for row in ended
        if str(row.pk) not in seen | alive
    ]
    return PlatformSearchPage(found=found, cursor=pagination.to_text(following) if following else None, is_cut=is_cut)


def _by_key(tids: Sequence[str], asked: TaskQuery) -> list[PlatformSearchResult]:
    """What this idempotency key has made, of each tenant."""
    assert asked.q is not None
    if not validation.is_idempotency_key(asked.q):
        return []
    key = [NewTask(command="", payload="", idempotency_key=asked.q)]
    known = _all([producer_commands.find_by_idempotency_key(engine(), tid, key) for tid in tids])
    made = [
        PlatformSearchResult(tid, each.task)
        for tid, answers in zip(tids, known, strict=True)
        for each in answers
        if each
    ]
    return [each for each in made if asked.fits(each.task)]


def _held(tids: Sequence[str], asked: TaskQuery) -> tuple[list[PlatformSearchResult], bool]:
    """What a worker of this name has in progress; and whether there was more than could be looked at."""
    if asked.status not in (None, Status.IN_PROGRESS):
        return [], False
    if asked.command is not None:
        queues = [(tid, asked.command) for tid in tids]
    else:
        names = _all([queries.list_queues(engine(), tid) for tid in tids])
        queues = [(tid, name) for tid, of_tenant in zip(tids, names, strict=True) for name in of_tenant]
    is_cut = len(queues) > QUEUES
    looked, held = 0, defaultdict[str, list[str]](list)
    for some in _pieces(queues[:QUEUES], TOGETHER):
        scans = _all([queries.scan(engine(), tid, command, "inprog", limit=LEASES) for tid, command in some])
        for (tid, _), leases in zip(some, scans, strict=True):
            looked += len(leases)
            is_cut = is_cut or len(leases) == LEASES
            held[tid] += [task_id for task_id, _, worker in leases if worker == asked.q]
        if looked > ALL_LEASES:
            is_cut = True
            break
    holders = {tid: ids[: pagination.PAGE] for tid, ids in held.items() if ids}
    return [each for each in _tasks(holders) if asked.fits(each.task)], is_cut


def _alive(ended: Sequence[AuditedResult]) -> set[str]:
    """Dead once, and no dead letter now: replayed perhaps, and then they live again."""
    perhaps = defaultdict[str, list[str]](list)
    for row in ended:
        if row.outcome != row.status and not row.is_dead:
            perhaps[str(row.tenant_id)].append(str(row.pk))
    return {each.task.id for each in _tasks(perhaps)}


def _tasks(ids: Mapping[str, Sequence[str]]) -> list[PlatformSearchResult]:
    ids = {tid: ids[tid] for tid in reachable_tenants(ids)}
    tasks = _all([queries.tasks(engine(), tid, of_tenant) for tid, of_tenant in ids.items()])
    return [
        PlatformSearchResult(tid, task) for tid, of_tenant in zip(ids, tasks, strict=True) for task in of_tenant if task
    ]


def _all(calls: Sequence[ScriptCall[R]]) -> list[R]:
    return [answer for some in _pieces(calls, TOGETHER) for answer in merge_calls(engine().runner, some).run_sync()]


def _pieces(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while piece := list(islice(rest, size)):
        yield piece
