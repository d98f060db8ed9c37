"""Record the calls of clients, and check that the recorded history is possible."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from tests.queues.engine.checked_engine import Event


@dataclass(frozen=True)
class RecordedCall:
    """A successful call. Times are milliseconds of this machine, which also runs the server."""

    operation: str  # claim heartbeat COMPLETED FAILED NACKED ABANDONED CANCELLED
    task_id: str
    token: str
    began_ms: float
    ended_ms: float
    from_ms: int = 0  # of a claim: start of the lease, from the server
    until_ms: int = 0  # of a claim or heartbeat: deadline of the lease, from the server
    attempts: int = 0  # of a claim: attempts that ended before, to order leases that start in the same millisecond


class History:
    """The successful calls of one client. Rejected calls change nothing."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def record(
        self,
        operation: str,
        task_id: str,
        token: str,
        began_ms: float,
        *,
        from_ms: int = 0,
        until_ms: int = 0,
        attempts: int = 0,
    ) -> None:
        self.calls.append(RecordedCall(operation, task_id, token, began_ms, now_ms(), from_ms, until_ms, attempts))


def now_ms() -> float:
    return time.time() * 1000


def find_violations(histories: Iterable[History], events: dict[str, list[Event]]) -> list[str]:
    """Return the violations of these rules: a task has one lease at a time, and ends once."""
    by_task: dict[str, list[RecordedCall]] = defaultdict(list)
    for history in histories:
        for call in history.calls:
            by_task[call.task_id].append(call)
    violations: list[str] = []
    for task_id, calls in by_task.items():
        violations += _find_overlapping_leases(task_id, calls)
        violations += _find_late_calls(task_id, calls)
        violations += _compare_endings(task_id, calls, events.get(task_id, []))
    for task_id, entries in events.items():
        violations += _find_overlapping_attempts(task_id, entries)
    return violations


def _find_overlapping_leases(task_id: str, calls: list[RecordedCall]) -> list[str]:
    violations = []
    leases = sorted(
        (call for call in calls if call.operation == "claim"), key=lambda call: (call.attempts, call.from_ms)
    )
    for lease, next_lease in pairwise(leases):
        same_lease = [call for call in calls if call.token == lease.token and call is not lease]
        released = [
            call
            for call in same_lease
            if call.operation not in ("claim", "heartbeat") and call.began_ms <= next_lease.ended_ms
        ]
        cancelled = [call for call in calls if call.operation == "CANCELLED" and call.began_ms <= next_lease.ended_ms]
        # A heartbeat may also shorten the lease. One client holds the lease, so its calls are in order.
        deadline = [lease.until_ms, *(call.until_ms for call in same_lease if call.operation == "heartbeat")][-1]
        if not released and not cancelled and deadline > next_lease.from_ms:
            violations.append(f"{task_id}: a lease until {deadline} overlaps one from {next_lease.from_ms}")
        late = [call for call in same_lease if call.began_ms > next_lease.ended_ms]
        violations += [f"{task_id}: {call.operation} accepted after its lease ended" for call in late]
    return violations


def _find_late_calls(task_id: str, calls: list[RecordedCall]) -> list[str]:
    """Find calls that were accepted after the deadline of their lease."""
    violations = []
    deadlines: dict[str, int] = {}
    for call in calls:
        if call.token and call.operation != "claim" and call.began_ms > deadlines[call.token] + 1:
            violations.append(
                f"{task_id}: {call.operation} accepted at {call.began_ms:.0f}, "
                f"but the lease expired at {deadlines[call.token]}"
            )
        if call.until_ms:
            deadlines[call.token] = call.until_ms
    return violations


def _compare_endings(task_id: str, calls: list[RecordedCall], entries: list[Event]) -> list[str]:
    """Compare the accepted endings with the events stream, except for expired leases."""
    accepted = Counter(call.operation for call in calls if call.operation not in ("claim", "heartbeat"))
    written = Counter(entry["outcome"] for entry in entries if entry["outcome"] != "EXPIRED")
    if accepted == written:
        return []
    return [f"{task_id}: accepted by clients: {dict(accepted)}, in the events stream: {dict(written)}"]


def _find_overlapping_attempts(task_id: str, entries: list[Event]) -> list[str]:
    violations = []
    attempts = [entry for entry in entries if entry["attempt"] != "0"]
    for first, second in pairwise(attempts):
        if int(second["claimed"]) < int(first["ended"]):
            violations.append(
                f"{task_id}: claimed at {second['claimed']}, but the previous attempt ended at {first['ended']}"
            )
    if sum(entry["status"] in ("COMPLETED", "FAILED", "CANCELLED") for entry in entries) > 1:
        violations.append(f"{task_id}: ended more than once")
    return violations
