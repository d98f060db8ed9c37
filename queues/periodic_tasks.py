"""What Celery beat has done about queues: the audit of what ended, repair, retention."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from core.conf import conf
from core.periodic_lock import PeriodicTaskLock
from queues import maintenance, metrics, policies
from queues.audit import drain as audit_drain
from queues.audit import stream
from queues.audit.events import Blobs, StreamEntry
from queues.deadletters import bulk_runner
from queues.periodic import periodic_task
from queues.stats import sampler

log = logging.getLogger(__name__)

# A run that has worked this long ends; the next tick goes on. Bounds how late it notices that another has
# the turn.
RUN_SECONDS = 20.0
CHUNK = 2000  # entries in one transaction
FETCH = 250  # entries whose blobs are asked for at once
CHUNK_BYTES = 32 * 2**20


@periodic_task("queues.drain")
def drain(lock: PeriodicTaskLock) -> str:
    """Move what ended from the events stream to PostgreSQL, until there is nothing left."""
    stored, refused = run_drain(lock.renew)
    return f"{stored} stored, {refused} in quarantine"


@periodic_task("queues.repair")
def repair(lock: PeriodicTaskLock) -> str:
    """Make due tasks ready and give back those whose lease is over, in every queue."""
    promoted, expired = maintenance.repair(lock.renew)
    return f"{promoted} ready, {expired} leases over"


@periodic_task("queues.cleanup", lock_seconds=60.0)
def cleanup(lock: PeriodicTaskLock) -> str:
    """Remove tasks whose retention is over."""
    return f"{maintenance.cleanup(lock.renew)} removed"


@periodic_task("queues.sample", lock_seconds=60.0)
def sample(lock: PeriodicTaskLock) -> str:
    """Write down how deep the queues are."""
    written, deleted = sampler.sample(lock.renew)
    return f"{written} written, {deleted} old ones deleted"


@periodic_task("queues.bulk")
def carry_on(lock: PeriodicTaskLock) -> str:
    """Carry on the bulk jobs that operators have asked for."""
    return f"{bulk_runner.run(lock.renew)} dealt with"


@periodic_task("queues.policies", lock_seconds=60.0)
def tell_policies(lock: PeriodicTaskLock) -> str:
    """Tell Redis of every queue's policy again, in case it was away or empty when one was made."""
    return f"{policies.sync(lock.renew)} told"


def run_drain(may_go_on: Callable[[], bool], *, seconds: float = RUN_SECONDS, chunk: int = CHUNK) -> tuple[int, int]:
    """Store, acknowledge, trim; how many entries went each way. Everything in it may happen twice.

    Entries that were read and not stored (a worker died, PostgreSQL was down) come before new ones, so a
    task's entries keep their order.
    """
    states = stream.survey()
    _warn_of_length(states.values())
    after = {partition: stream.UNACKNOWLEDGED for partition, state in states.items() if state.waiting}
    until = time.monotonic() + seconds
    stored = refused = 0
    while after and time.monotonic() < until:
        share = max(1, chunk // len(after))
        entries = stream.read(after, share)
        for batch in _batches(entries):
            if not may_go_on():
                return stored, refused
            events, bad = audit_drain.store(batch)
            stream.acknowledge([entry for entry, _ in batch])
            metrics.ended(events)
            refused += bad
            stored += len(batch) - bad
        got = Counter(entry.partition for entry in entries)
        for partition in [partition for partition in after if got[partition] < share]:
            if after[partition] == stream.NEW:
                del after[partition]
            else:
                after[partition] = stream.NEW
    return stored, refused


def _batches(entries: Sequence[StreamEntry]) -> Iterator[list[tuple[StreamEntry, Blobs]]]:
    """Entries with their blobs, in pieces that fit in memory whatever the payloads are."""
    batch: list[tuple[StreamEntry, Blobs]] = []
    size = 0
    for at in range(0, len(entries), FETCH):
        part = entries[at : at + FETCH]
        for entry, blobs in zip(part, stream.read_blobs(part), strict=True):
            batch.append((entry, blobs))
            size += len(blobs.spec or b"") + len(blobs.answer or b"")
        if size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _warn_of_length(states: Iterable[stream.StreamState]) -> None:
    longest = max((state.length for state in states), default=0)
    if longest > conf().queues.events_alarm:
        log.error("an events stream holds %d entries: is the drain running, and PostgreSQL up?", longest)
