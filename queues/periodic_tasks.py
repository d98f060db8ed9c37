"""The periodic tasks of queues: drain, repair, cleanup, samples, bulk jobs and policies."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from core.conf import conf
from core.periodic_lock import PeriodicTaskLock
from queues import maintenance, metrics, policies, work_checks
from queues.audit import drain as audit_drain
from queues.audit import stream
from queues.audit.events import Blobs, StreamEntry
from queues.deadletters import bulk_runner
from queues.periodic import periodic_task
from queues.stats import sampler

log = logging.getLogger(__name__)

# A run of the drain stops after this time, and the next one continues. This also limits how long two runs work beside
# each other if they hold the lock in different partitions (`PeriodicTaskLock.acquire`).
RUN_SECONDS = 20.0
CHUNK = 4000  # entries in one transaction
FETCH = 250  # entries whose blobs are read in one call
CHUNK_BYTES = 32 * 2**20

Batch = list[tuple[StreamEntry, Blobs]]


@periodic_task("queues.drain", has_work=work_checks.has_events)
def drain(lock: PeriodicTaskLock) -> str:
    """Move the entries of the events streams to PostgreSQL, for at most RUN_SECONDS."""
    stored, quarantined = run_drain(lock.renew)
    return f"{stored} stored, {quarantined} in quarantine"


@periodic_task("queues.repair", has_work=work_checks.has_due_tasks)
def repair(lock: PeriodicTaskLock) -> str:
    """Make due tasks ready and end expired leases, in every queue."""
    promoted, expired = maintenance.repair(lock.renew)
    return f"{promoted} ready, {expired} leases expired"


@periodic_task("queues.cleanup", lock_seconds=60.0)
def cleanup(lock: PeriodicTaskLock) -> str:
    """Delete tasks whose retention has ended."""
    return f"{maintenance.cleanup(lock.renew)} removed"


@periodic_task("queues.sample", lock_seconds=60.0)
def sample(lock: PeriodicTaskLock) -> str:
    """Record the depths of the queues."""
    written, deleted = sampler.sample(lock.renew)
    return f"{written} written, {deleted} old samples deleted"


@periodic_task("queues.bulk", has_work=work_checks.has_bulk_jobs)
def run_bulk_jobs(lock: PeriodicTaskLock) -> str:
    """Continue the bulk jobs that operators have started."""
    return f"{bulk_runner.run(lock.renew)} handled"


@periodic_task("queues.policies", lock_seconds=60.0)
def sync_policies(lock: PeriodicTaskLock) -> str:
    """Write every policy to Redis again, in case Redis was down or has lost its data."""
    return f"{policies.sync(lock.renew)} written"


def run_drain(may_continue: Callable[[], bool], *, seconds: float = RUN_SECONDS, chunk: int = CHUNK) -> tuple[int, int]:
    """Store entries in PostgreSQL, then acknowledge and trim them. Every step may be repeated.

    Returns the number of stored and of quarantined entries. Entries that an earlier run read and did not store,
    because it was killed or PostgreSQL was down, come before new ones, so that the entries of a task keep their order.
    """
    states = stream.survey()
    _warn_if_long(states.values())
    after = {partition: stream.UNACKNOWLEDGED for partition, state in states.items() if state.waiting}
    batches = _read_batches(after, time.monotonic() + seconds, chunk)
    stored = quarantined = 0
    with ThreadPoolExecutor(1, "drain-reader") as reader, _paused_garbage_collector():
        # The next batch is read from Redis while PostgreSQL stores this one.
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None and may_continue():
            following = reader.submit(next, batches, None)
            events, batch_quarantined = audit_drain.store(batch)
            stream.acknowledge([entry for entry, _ in batch])
            metrics.ended(events)
            quarantined += batch_quarantined
            stored += len(batch) - batch_quarantined
    return stored, quarantined


def _read_batches(after: dict[int, str], until: float, chunk: int) -> Iterator[Batch]:
    """Read all entries of these partitions, in batches.

    The batches fit in memory with payloads of any size. `after` maps a partition to the id after which its
    unacknowledged entries are read. The new entries follow.
    """
    while after and time.monotonic() < until:
        share = max(1, chunk // len(after))
        entries = stream.read(after, share)
        yield from _split_by_size(entries)
        last_ids = {entry.partition: entry.stream_id for entry in entries}
        counts = Counter(entry.partition for entry in entries)
        for partition, start in list(after.items()):
            if counts[partition] == share:
                # Entries of an earlier batch may not be acknowledged yet, so the next part starts after them.
                after[partition] = start if start == stream.NEW else last_ids[partition]
            elif start == stream.NEW:
                del after[partition]
            else:
                after[partition] = stream.NEW


@contextlib.contextmanager
def _paused_garbage_collector() -> Iterator[None]:
    """Keep the garbage collector from running in the block.

    It would search all objects of the process every few thousand entries, which took a quarter of the drain's CPU.
    Reference counting frees the entries, and a run is short.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _split_by_size(entries: Sequence[StreamEntry]) -> Iterator[Batch]:
    """Yield entries with their blobs, in batches of limited size."""
    batch: Batch = []
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


def _warn_if_long(states: Iterable[stream.StreamState]) -> None:
    longest = max((state.length for state in states), default=0)
    if longest > conf().queues.events_alarm:
        log.error("an events stream holds %d entries: is the drain running, and PostgreSQL up?", longest)
