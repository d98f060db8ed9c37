"""What clients saw, written down as it happened, and what must be true of it whatever the order was."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from tests.queues.engine.world import Event


@dataclass(frozen=True)
class Act:
    """One answered call. Times in milliseconds of this machine, which is the server's too."""

    verb: str  # claim heartbeat COMPLETED FAILED NACKED ABANDONED CANCELLED
    task_id: str
    token: str
    began_ms: float
    ended_ms: float
    from_ms: int = 0  # of a claim: when the lease began, by the server
    until_ms: int = 0  # of a claim and a heartbeat: the deadline, by the server
    attempts: int = 0  # of a claim: how many attempts had ended before; so leases are in order within a millisecond


class History:
    """The acts of one client that were accepted. Refusals change nothing, so nothing is to be said of them."""

    def __init__(self) -> None:
        self.acts: list[Act] = []

    def note(
        self,
        verb: str,
        task_id: str,
        token: str,
        began_ms: float,
        *,
        from_ms: int = 0,
        until_ms: int = 0,
        attempts: int = 0,
    ) -> None:
        self.acts.append(Act(verb, task_id, token, began_ms, now_ms(), from_ms, until_ms, attempts))


def now_ms() -> float:
    return time.time() * 1000


def violations(histories: Iterable[History], events: dict[str, list[Event]]) -> list[str]:
    """Everything that cannot have happened if one lease lives at a time and a task ends once."""
    by_task: dict[str, list[Act]] = defaultdict(list)
    for history in histories:
        for act in history.acts:
            by_task[act.task_id].append(act)
    wrong: list[str] = []
    for task_id, acts in by_task.items():
        wrong += _overlaps(task_id, acts)
        wrong += _late(task_id, acts)
        wrong += _endings(task_id, acts, events.get(task_id, []))
    for task_id, entries in events.items():
        wrong += _intervals(task_id, entries)
    return wrong


def _overlaps(task_id: str, acts: list[Act]) -> list[str]:
    wrong = []
    leases = sorted((act for act in acts if act.verb == "claim"), key=lambda act: (act.attempts, act.from_ms))
    for one, other in pairwise(leases):
        mine = [act for act in acts if act.token == one.token and act is not one]
        let_go = [act for act in mine if act.verb not in ("claim", "heartbeat") and act.began_ms <= other.ended_ms]
        cancelled = [act for act in acts if act.verb == "CANCELLED" and act.began_ms <= other.ended_ms]
        # A heartbeat may also bring the deadline nearer; one client holds the lease, so its acts are in order.
        deadline = [one.until_ms, *(act.until_ms for act in mine if act.verb == "heartbeat")][-1]
        if not let_go and not cancelled and deadline > other.from_ms:
            wrong.append(f"{task_id}: a lease until {deadline} and another from {other.from_ms}")
        late = [act for act in mine if act.began_ms > other.ended_ms]
        wrong += [f"{task_id}: {act.verb} accepted of a lease that was over" for act in late]
    return wrong


def _late(task_id: str, acts: list[Act]) -> list[str]:
    """Nothing is accepted of a holder who spoke after the deadline, reaped or not."""
    wrong = []
    deadlines: dict[str, int] = {}
    for act in acts:
        if act.token and act.verb != "claim" and act.began_ms > deadlines[act.token] + 1:
            wrong.append(
                f"{task_id}: {act.verb} accepted at {act.began_ms:.0f}, the lease was over at {deadlines[act.token]}"
            )
        if act.until_ms:
            deadlines[act.token] = act.until_ms
    return wrong


def _endings(task_id: str, acts: list[Act], entries: list[Event]) -> list[str]:
    """Each accepted ending has its entry in the outbox, and each entry but expiry somebody who was told."""
    told = Counter(act.verb for act in acts if act.verb not in ("claim", "heartbeat"))
    written = Counter(entry["outcome"] for entry in entries if entry["outcome"] != "EXPIRED")
    return [] if told == written else [f"{task_id}: clients were told {dict(told)}, the outbox says {dict(written)}"]


def _intervals(task_id: str, entries: list[Event]) -> list[str]:
    wrong = []
    worked = [entry for entry in entries if entry["attempt"] != "0"]
    for one, other in pairwise(worked):
        if int(other["claimed"]) < int(one["ended"]):
            wrong.append(f"{task_id}: claimed at {other['claimed']} before the attempt before ended at {one['ended']}")
    if sum(entry["status"] in ("COMPLETED", "FAILED", "CANCELLED") for entry in entries) > 1:
        wrong.append(f"{task_id}: ended more than once")
    return wrong
