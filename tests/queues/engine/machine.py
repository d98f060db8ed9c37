"""A state machine that compares the engine with the model in random operations.

The engine works on a real Valkey, whose whole keyspace is compared after every step.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import msgspec
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core import errors
from core.redis.script_call import Runner, ScriptCall
from queues.domain import Claimed, Enqueued, NewResult, NewTask, Result, Spec, Task, TaskStatus
from queues.engine import (
    admin_commands,
    dead_letter_commands,
    maintenance_commands,
    producer_commands,
    queries,
    worker_commands,
)
from queues.engine import keys as key_builders
from queues.engine.producer_commands import digest_key
from tests.fixtures.queues import START_MS
from tests.queues.engine.checked_engine import OTHER_TID, TID, CheckedEngine, Clock, Location, Snapshot, build_task
from tests.queues.engine.model import Lease, Model, ModelTask

RETENTION_MS, DEAD_RETENTION_MS = 600_000, 1_200_000
OPTIONS = {
    "partitions": 4,
    "max_attempts": 3,
    "repair_limit": 3,
    "backoff": "exponential",
    "backoff_base_ms": 4_000,
    "backoff_cap_ms": 10_000,
    "dead_retention_ms": DEAD_RETENTION_MS,
    "horizon_ms": 3_600_000,
}
# The cases that a run must cover.
REQUIRED_CASES = {
    *("enqueued", "delayed", "repeated key", "mismatched key", "too far", "key twice in a batch", "call repeated"),
    *("claimed", "claimed from several queues", "claimed nothing", "skipped a ghost", "expired in a claim"),
    *("claimed together", "claimed for some of the workers", "claimed for different workers"),
    *("heartbeat", "submitted", "submitted again", "nacked", "abandoned"),
    *("submitted for different workers", "submitted for some of the workers"),
    *("cancelled", "cancelled while ready", "cancelled in progress"),
    *("dead by nack", "dead by abandon", "dead by expiry", "promoted", "reaped", "replayed", "purged", "not purged"),
    *("replayed in bulk", "purged in bulk"),
    *("cleaned up", "paused", "resumed"),
    *("claimed from a dead letter queue", "claimed up to the limit", "died twice", "key expired"),
    *("lease_lost", "not_owner", "task_cancelled", "already_ended", "task_not_found", "not_dead"),
}

tenants = st.sampled_from([TID, TID, TID, OTHER_TID])
commands = st.sampled_from(["send", "send", "mail.v2"])
workers = st.sampled_from(["w1", "w2"])
tokens = st.sampled_from(["mine", "mine", "", "forged"])
# The number of times that a call is sent. 2 simulates a client that lost the reply and sends the same bytes again.
times = st.sampled_from([1, 1, 1, 2])
# How to select a task or a lease: whether to select only from those in a state that the operation accepts, and a number
# that selects one of them. Usually true, because operations reject all others in the same way.
choice = st.tuples(st.sampled_from([True, True, True, False]), st.integers(0, 50))
choices = st.lists(choice, min_size=1, max_size=3)
Choice = tuple[bool, int]
new_tasks = st.builds(
    NewTask,
    command=commands,
    payload=st.sampled_from(["{}", '{"a":[]}']),
    priority=st.sampled_from([0, 0, 4, 9]),
    max_attempts=st.sampled_from([None, 1, 2]),
    idempotency_key=st.sampled_from([None, None, None, None, "k1", "k2", "k3"]),
    delay_ms=st.sampled_from([0, 0, 0, 0, 0, 1, 5_000, 30_000, 4_000_000]),
    run_at_ms=st.sampled_from([None, None, None, None, None, START_MS - 1, START_MS + 20_000]),
)


class QueueMachine(RuleBasedStateMachine):
    """Random operations on the engine and on the model, whose replies and state must agree."""

    client: ClassVar[redis.Redis]
    covered: ClassVar[Counter[str]]
    runner: ClassVar[Runner | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.clock = Clock()
        self.checked = CheckedEngine(self.client, clock=self.clock, runner=self.runner, **OPTIONS)
        self.engine = self.checked.engine
        self.model = Model(self.engine.options, RETENTION_MS, DEAD_RETENTION_MS)
        self.leases: list[Lease] = []

    # Producers

    @initialize(tasks=st.lists(new_tasks, min_size=3, max_size=8), with_policy_cycle=st.booleans())
    def start(self, tasks: list[NewTask], with_policy_cycle: bool) -> None:
        self.enqueue(TID, tasks, 1)
        if with_policy_cycle:  # two queues are the dead letter queues of each other
            self.set_policy(TID, "send", ("fixed", 0, 0), None, True)
            self.set_policy(TID, "mail.v2", ("fixed", 0, 0), None, True)

    @precondition(lambda self: sum(map(len, self.model.ready.values())) < 3)
    @rule(count=st.integers(3, 6), command=commands, max_attempts=st.sampled_from([None, 1, 2]))
    def refill(self, count: int, command: str, max_attempts: int | None) -> None:
        """Add tasks, because runs on empty queues cover little."""
        self.enqueue(TID, [build_task(command, max_attempts=max_attempts) for _ in range(count)], 1)

    @rule(tid=tenants, tasks=st.lists(new_tasks, min_size=1, max_size=4), times=times)
    def enqueue(self, tid: str, tasks: list[NewTask], times: int) -> None:
        call = producer_commands.enqueue(self.engine, tid, "acme", tasks, retention_ms=RETENTION_MS)
        ids = _find_generated_ids(call, tasks)
        for answers in self._send(call, times):
            expected = self.model.enqueue(tid, tasks, ids, self.now)
            assert len(answers) == len(expected)
            for answer, item, new_task in zip(answers, expected, tasks, strict=True):
                if item is errors.InvalidRequest:
                    assert isinstance(answer, errors.InvalidRequest)
                    self.cover("too far")
                    continue
                task_id, is_repeated, is_mismatch = item
                assert isinstance(answer, Enqueued)
                assert (answer.task.id, answer.is_repeated, answer.is_mismatch) == item
                self._assert_task_equals(answer.task, self.model.tasks[task_id])
                self.cover("enqueued")
                self.cover("delayed", answer.task.location is Location.DELAYED_ZSET)
                self.cover("repeated key", is_repeated)
                self.cover("mismatched key", is_mismatch)
                key = new_task.idempotency_key
                self.cover(
                    "key twice in a batch", bool(key) and sum(other.idempotency_key == key for other in tasks) > 1
                )

    @rule(tid=tenants, tasks=st.lists(new_tasks, min_size=1, max_size=3))
    def find_by_idempotency_key(self, tid: str, tasks: list[NewTask]) -> None:
        tasks = [new_task for new_task in tasks if new_task.idempotency_key]
        for answer, new_task in zip(
            producer_commands.find_by_idempotency_key(self.engine, tid, tasks).run_sync(), tasks, strict=True
        ):
            task_id = self.model.idem.get((tid, new_task.idempotency_key or ""))
            assert (answer and answer.task.id) == task_id
            if answer and task_id:
                assert answer.is_mismatch == (self.model.tasks[task_id].request != new_task)

    @rule(tid=tenants, key=st.sampled_from(["k1", "k2", "k3"]))
    def expire_key(self, tid: str, key: str) -> None:
        """Delete a key as its expiry would. Redis expires keys by its own clock, not the test's."""
        root = key_builders.of_partition(self.engine.partition_of(tid)).root
        self.client.delete(f"{root}idem:{tid}:{digest_key(key)}")
        self.cover("key expired", bool(self.model.idem.pop((tid, key), None)))

    @rule(chosen=choice, times=times)
    def cancel(self, chosen: Choice, times: int) -> None:
        task = self._choose_task(chosen, "ready", "delayed", "inprog")
        model_task = self.model.find(*task)
        place = model_task.place if model_task else "deleted"
        for answer in self._send(producer_commands.cancel(self.engine, *task, retention_ms=RETENTION_MS), times):
            refusal = self.model.cancel(*task, self.now)
            if refusal:
                assert type(answer) is refusal
                self.cover_refusal(refusal)
            else:
                assert answer.status is TaskStatus.CANCELLED
                self.cover(
                    {"ready": "cancelled while ready", "inprog": "cancelled in progress"}.get(place, "cancelled")
                )

    # Workers

    @rule(worker=workers, limit=st.integers(1, 4), times=times)
    def claim_from_usual_queues(self, worker: str, limit: int, times: int) -> None:
        """Claim from the queues that usually have tasks."""
        self.claim(TID, ["send", "mail.v2"], worker, 30, limit, 0, times)

    @rule(
        tid=tenants,
        names=st.lists(st.sampled_from(["send", "mail.v2", "never"]), min_size=1, max_size=3, unique=True),
        worker=workers,
        lease_s=st.sampled_from([1, 10, 30, 30]),
        limit=st.integers(1, 8),
        wait_ms=st.sampled_from([0, 0, 1000]),
        times=times,
    )
    def claim(
        self, tid: str, names: list[str], worker: str, lease_s: int, limit: int, wait_ms: int, times: int
    ) -> None:
        self._claim(tid, names, [worker] * limit, lease_s, times, limit=limit, wait_ms=wait_ms)

    @rule(
        tid=tenants,
        names=st.lists(st.sampled_from(["send", "mail.v2", "never"]), min_size=1, max_size=3, unique=True),
        claimants=st.lists(workers, min_size=2, max_size=5),
        lease_s=st.sampled_from([1, 10, 30, 30]),
        wait_ms=st.sampled_from([0, 0, 1000]),
        times=times,
    )
    def claim_together(
        self, tid: str, names: list[str], claimants: list[str], lease_s: int, wait_ms: int, times: int
    ) -> None:
        """Claim a task for each of several workers.

        They get the tasks in the order in which one worker would get them.
        """
        claimed = self._claim(
            tid,
            names,
            claimants,
            lease_s,
            times,
            limit=len(claimants),
            wait_ms=wait_ms,
            further_workers=claimants[1:],
        )
        self.cover("claimed together", len(claimed) == len(claimants))
        self.cover("claimed for some of the workers", 0 < len(claimed) < len(claimants))
        self.cover("claimed for different workers", len({task.worker for task in claimed}) > 1)
        assert len({task.lease_token for task in claimed}) == len(claimed)

    def _claim(
        self, tid: str, names: list[str], workers: list[str], lease_s: int, times: int, **options: Any
    ) -> list[Task]:
        """Claim tasks, and return those of the last reply. `workers` has the worker of each task."""
        call = worker_commands.claim(
            self.engine,
            tid,
            names,
            workers[0],
            lease_ms=lease_s * 1000,
            dead_retention_ms=DEAD_RETENTION_MS,
            **options,
        )
        limit = options["limit"]
        ghosts = self._count_ghosts()
        for claimed in self._send(call, times):
            assert isinstance(claimed, Claimed)
            events = sum(len(model_task.events) for model_task in self.model.tasks.values())
            expected = self.model.claim(tid, names, limit, self.now)
            assert [task.id for task in claimed.tasks] == [model_task.id for model_task in expected]
            assert claimed.now_ms == self.now
            for task, model_task, worker in zip(claimed.tasks, expected, workers, strict=False):
                assert task.lease_token
                self.model.lease(model_task, worker, task.lease_token, self.now, lease_s * 1000)
                self.leases.append(Lease(tid, task.id, worker, task.lease_token))
                self._assert_task_equals(task, model_task)
                assert task.lease_until_ms == model_task.deadline
            assert claimed.expired == sum(len(model_task.events) for model_task in self.model.tasks.values()) - events
            for model_task in expected:
                max_consumers = self.model.max_consumers.get(model_task.queue)
                self.cover(
                    "claimed up to the limit", max_consumers == len(self.model.list_tasks(model_task.queue, "inprog"))
                )
            if not expected or (options.get("further_workers") and len(expected) < limit):
                self._check_next_due(tid, names, claimed)
            self.cover("claimed" if expected else "claimed nothing")
            self.cover("claimed from a dead letter queue", any(model_task.was_forwarded for model_task in expected))
            self.cover("claimed from several queues", len({model_task.command for model_task in expected}) > 1)
            self.cover("expired in a claim", claimed.expired > 0)
            self.cover("dead by expiry", claimed.dead > 0)
            self.cover(
                "died twice",
                any(model_task.was_forwarded and model_task.place == "dlq" for model_task in self.model.tasks.values()),
            )
        self.cover("skipped a ghost", ghosts > self._count_ghosts())
        return list(claimed.tasks)

    def _check_next_due(self, tid: str, names: Sequence[str], claimed: Claimed) -> None:
        """Check that an empty claim returns a time for the next claim that is not too late."""
        active = [command for command in names if self.model.paused.get((tid, command)) is False]
        moments = [moment for command in active if (moment := self.model.first_due((tid, command))) is not None]
        if moments:
            assert claimed.next_due_ms is not None
            assert claimed.next_due_ms <= min(moments)

    @precondition(lambda self: self.leases)
    @rule(
        chosen=choice,
        extend_s=st.sampled_from([1, 5, 30, 60]),
        worker=st.none() | workers,
        token=tokens,
        progress=st.sampled_from(["", "50"]),
        times=times,
    )
    def heartbeat(
        self, chosen: Choice, extend_s: int, worker: str | None, token: str, progress: str, times: int
    ) -> None:
        lease, token = self._choose_lease_and_token(chosen, worker, token)
        call = worker_commands.heartbeat(
            self.engine, lease.tid, lease.id, lease.worker, extend_ms=extend_s * 1000, token=token, progress=progress
        )
        for answer in self._send(call, times):
            expected = self.model.heartbeat(lease, token, extend_s * 1000, progress, self.now)
            if isinstance(expected, int):
                assert answer.until_ms == expected
                self.cover("heartbeat")
            else:
                assert type(answer) is expected
                self.cover_refusal(expected)

    @precondition(lambda self: self.leases)
    @rule(
        chosen=choices,
        status=st.sampled_from([TaskStatus.COMPLETED, TaskStatus.COMPLETED, TaskStatus.FAILED]),
        result=st.sampled_from([b"[]", b'{"ok":1}']),
        with_token=st.booleans(),
        times=times,
    )
    def submit(self, chosen: list[Choice], status: TaskStatus, result: bytes, with_token: bool, times: int) -> None:
        held = [self._choose_lease(selected) for selected in chosen]
        results = [_build_result(lease, status, result, with_token) for lease in held]
        self._submit(held, held[0].worker, results, times)

    @precondition(lambda self: self.leases)
    @rule(
        chosen=st.lists(st.tuples(choice, st.none() | workers), min_size=2, max_size=4),
        status=st.sampled_from([TaskStatus.COMPLETED, TaskStatus.COMPLETED, TaskStatus.FAILED]),
        result=st.sampled_from([b"[]", b'{"ok":1}']),
        with_token=st.booleans(),
        times=times,
    )
    def submit_together(
        self,
        chosen: list[tuple[Choice, str | None]],
        status: TaskStatus,
        result: bytes,
        with_token: bool,
        times: int,
    ) -> None:
        """Send the results of several workers, who may not hold the leases, as one call."""
        held = [self._choose_lease(selected) for selected, _ in chosen]
        results = [
            msgspec.structs.replace(_build_result(lease, status, result, with_token), worker=worker or lease.worker)
            for lease, (_, worker) in zip(held, chosen, strict=True)
        ]
        accepted = self._submit(held, None, results, times)
        self.cover("submitted for different workers", len({answer.worker for answer in accepted}) > 1)
        self.cover("submitted for some of the workers", 0 < len(accepted) < len(held))

    def _submit(self, held: list[Lease], worker: str | None, results: list[NewResult], times: int) -> list[Result]:
        """Submit results of these leases, and return the accepted ones of the last reply."""
        tid = held[0].tid
        call = worker_commands.submit(self.engine, tid, worker, results, retention_ms=RETENTION_MS)
        for answers in self._send(call, times):
            before = {
                lease.id for lease in held if (model_task := self.model.find(tid, lease.id)) and model_task.answer
            }
            expected = self.model.submit(tid, worker or "", results, self.now)
            for answer, item, lease, new in zip(answers, expected, held, results, strict=True):
                if isinstance(item, tuple):
                    assert isinstance(answer, Result)
                    assert (answer.completed_ms, answer.attempts, answer.status) == (*item, new.status)
                    assert answer.worker == (new.worker or worker)
                    self.cover("submitted again" if lease.id in before else "submitted")
                else:
                    assert type(answer) is item
                    self.cover_refusal(item)
        return [answer for answer in answers if isinstance(answer, Result)]

    @precondition(lambda self: self.leases)
    @rule(
        chosen=choice,
        token=tokens,
        delay_ms=st.sampled_from([None, None, 0, 7_000]),
        reason=st.sampled_from(["", "boom"]),
        times=times,
    )
    def nack(self, chosen: Choice, token: str, delay_ms: int | None, reason: str, times: int) -> None:
        lease, token = self._choose_lease_and_token(chosen, None, token)
        call = worker_commands.nack(
            self.engine,
            lease.tid,
            lease.id,
            lease.worker,
            token=token,
            delay_ms=delay_ms,
            reason=reason,
            dead_retention_ms=DEAD_RETENTION_MS,
        )
        for answer in self._send(call, times):
            self._check_release(answer, "nack", self.model.nack(lease, token, delay_ms, reason, self.now))

    @precondition(lambda self: self.leases)
    @rule()
    def nack_every_leased_task(self) -> None:
        """Nack all leased tasks, because otherwise few tasks die, and hardly any dies twice."""
        for _ in [model_task for model_task in self.model.tasks.values() if model_task.place == "inprog"]:
            self.nack((True, 0), "mine", 0, "boom", 1)

    @precondition(lambda self: self.leases)
    @rule(chosen=choice, token=tokens, times=times)
    def abandon(self, chosen: Choice, token: str, times: int) -> None:
        lease, token = self._choose_lease_and_token(chosen, None, token)
        call = worker_commands.abandon(
            self.engine, lease.tid, lease.id, lease.worker, token=token, dead_retention_ms=DEAD_RETENTION_MS
        )
        for answer in self._send(call, times):
            self._check_release(answer, "abandon", self.model.abandon(lease, token, self.now))

    def _check_release(self, answer: Any, verb: str, expected: Any) -> None:
        if isinstance(expected, tuple):
            assert (answer.is_dead, answer.delay_ms) == expected
            self.cover(f"dead by {verb}" if answer.is_dead else f"{verb}ed")
        else:
            assert type(answer) is expected
            self.cover_refusal(expected)

    # Time, periodic tasks, operators

    @rule(seconds=st.sampled_from([0.001, 1, 4, 10, 30, 30, 120, 700, 1300]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(tid=tenants, command=commands, limit=st.integers(1, 4))
    def promote(self, tid: str, command: str, limit: int) -> None:
        moved, next_due = maintenance_commands.promote(self.engine, tid, command, limit).run_sync()
        assert moved == self.model.promote((tid, command), limit, self.now)
        assert next_due == (self.model.first_due((tid, command)) or 0)
        self.cover("promoted", moved > 0)

    @rule(tid=tenants, command=commands, limit=st.integers(1, 4))
    def reap(self, tid: str, command: str, limit: int) -> None:
        expired, dead, next_due = maintenance_commands.reap(
            self.engine, tid, command, limit, dead_retention_ms=DEAD_RETENTION_MS
        ).run_sync()
        assert (expired, dead) == self.model.reap((tid, command), limit, self.now)
        assert next_due == (self.model.first_due((tid, command)) or 0)
        self.cover("reaped", expired > 0)
        self.cover("dead by expiry", dead > 0)

    @rule()
    def list_due_queues(self) -> None:
        """Check that the list of due queues is complete."""
        partitions = {self.engine.partition_of(tid) for tid in (TID, OTHER_TID)}
        due_queues = {
            queue
            for partition in partitions
            for queue in maintenance_commands.due_queues(self.engine, partition).run_sync()
        }
        queues = {model_task.queue for model_task in self.model.tasks.values()}
        assert due_queues >= {queue for queue in queues if (self.model.first_due(queue) or self.now + 1) <= self.now}

    @rule(chosen=choices, edited=st.booleans(), times=times)
    def replay(self, chosen: list[Choice], edited: bool, times: int) -> None:
        tid, ids = self._choose_tasks(chosen, "dlq")
        queues = [self.model.tasks[task_id].request.command if edited and self.model.tasks else "" for task_id in ids]
        specs = [
            Spec(command=command, payload='{"edited":1}', tenant="acme") if command else None for command in queues
        ]
        for answers in self._send(dead_letter_commands.replay(self.engine, tid, ids, specs), times):
            expected = self.model.replay(tid, ids, self.now)
            for answer, refusal in zip(answers, expected, strict=True):
                if refusal:
                    assert type(answer) is refusal
                    self.cover_refusal(refusal)
                else:
                    assert isinstance(answer, Task)
                    assert (answer.status, answer.attempts) == (TaskStatus.PENDING, 0)
                    assert not edited or answer.spec.payload == '{"edited":1}'
                self.cover("replayed", not refusal)

    @rule(chosen=choices, job=st.sampled_from(["job 1", "job 2"]), is_purge=st.booleans(), times=times)
    def run_bulk_job(self, chosen: list[Choice], job: str, is_purge: bool, times: int) -> None:
        tid, ids = self._choose_tasks(chosen, "dlq")
        call = (
            maintenance_commands.purge_dead(self.engine, tid, ids)
            if is_purge
            else dead_letter_commands.replay_for(self.engine, tid, ids, job)
        )
        for answers in self._send(call, times):
            model = self.model
            expected = model.purge_dead(tid, ids) if is_purge else model.replay_for(tid, ids, job, self.now)
            assert [answer and type(answer) for answer in answers] == expected
            self.cover("purged in bulk" if is_purge else "replayed in bulk", None in expected)

    @rule(chosen=choices, times=times)
    def purge(self, chosen: list[Choice], times: int) -> None:
        tid, ids = self._choose_tasks(chosen, "dlq", "terminal")
        for deleted in self._send(maintenance_commands.purge(self.engine, tid, ids), times):
            assert deleted == self.model.purge(tid, ids)
            self.cover("purged", any(deleted))
            self.cover("not purged", not all(deleted))

    @rule(tid=tenants, ago_s=st.sampled_from([0, 0, 100]), limit=st.integers(1, 5))
    def clean_up(self, tid: str, ago_s: int, limit: int) -> None:
        before_ms = self.now - ago_s * 1000
        now_ms, ids = maintenance_commands.expired(self.engine, tid, before_ms=before_ms, limit=limit).run_sync()
        expired = sorted(
            (model_task.expires, model_task.id)
            for model_task in self.model.tasks.values()
            if model_task.tid == tid and model_task.place in ("dlq", "terminal") and model_task.expires <= before_ms
        )
        assert (now_ms, ids) == (self.now, [task_id for _, task_id in expired[:limit]])
        assert maintenance_commands.purge(self.engine, tid, ids, before_ms=before_ms).run_sync() == self.model.purge(
            tid, ids, before_ms
        )
        self.cover("cleaned up", bool(ids))

    @rule(tid=tenants, command=commands, is_paused=st.sampled_from([True, False, False]))
    def pause_or_resume(self, tid: str, command: str, is_paused: bool) -> None:
        change = admin_commands.pause if is_paused else admin_commands.resume
        change(self.engine, tid, command).run_sync()
        self.model.paused[tid, command] = is_paused
        self.cover("paused" if is_paused else "resumed")

    @rule(
        tid=tenants,
        command=commands,
        backoff=st.sampled_from([("fixed", 0, 0), ("linear", 3000, 5000), None]),
        max_consumers=st.sampled_from([None, None, 1, 2]),
        has_dead_letter_queue=st.sampled_from([True, True, False]),
    )
    def set_policy(
        self,
        tid: str,
        command: str,
        backoff: tuple[str, int, int] | None,
        max_consumers: int | None,
        has_dead_letter_queue: bool,
    ) -> None:
        """Set a policy; two queues may be the dead letter queues of each other."""
        other_command = {"send": "mail.v2", "mail.v2": "send"}[command]
        dead_letter_queue = other_command if has_dead_letter_queue and backoff else ""
        policy = " ".join(map(str, [*backoff, dead_letter_queue])).strip() if backoff else ""
        admin_commands.set_policy(
            self.engine, tid, command, policy=policy, max_consumers=max_consumers, dead_letter_queue=dead_letter_queue
        ).run_sync()
        queue, model = (tid, command), self.model
        model.paused.setdefault(queue, False)
        if dead_letter_queue:
            model.paused.setdefault((tid, dead_letter_queue), False)
        model.policies.pop(queue, None)
        model.max_consumers.pop(queue, None)
        if backoff:
            model.policies[queue] = (*backoff, dead_letter_queue)
        if max_consumers is not None:
            model.max_consumers[queue] = max_consumers

    @rule(chosen=choice, worker=workers)
    def act_as_another_tenant(self, chosen: Choice, worker: str) -> None:
        """Check that a tenant can neither change another tenant's task nor detect that it exists."""
        owner, task_id = self._choose_task(chosen, "inprog", "dlq")
        tid = OTHER_TID if owner == TID else TID
        model_task = self.model.tasks.get(task_id)
        holder, token = (model_task.worker, model_task.token) if model_task and model_task.worker else (worker, "")
        engine = self.engine
        result = NewResult(task_id=task_id, status=TaskStatus.COMPLETED, result=b"1", lease_token=token)
        for call in (
            queries.task(engine, tid, task_id, watch=True),
            worker_commands.heartbeat(engine, tid, task_id, holder, extend_ms=1, token=token, progress="1"),
            worker_commands.nack(engine, tid, task_id, holder, token=token, delay_ms=0, reason="", dead_retention_ms=1),
            worker_commands.abandon(engine, tid, task_id, holder, token=token, dead_retention_ms=1),
            producer_commands.cancel(engine, tid, task_id, retention_ms=1),
            worker_commands.submit(engine, tid, holder, [result], retention_ms=1),
            dead_letter_commands.replay(engine, tid, [task_id]),
        ):
            answer = self._send_once(call)
            assert isinstance(answer[0] if isinstance(answer, list) else answer, errors.TaskNotFound)
        assert maintenance_commands.purge(engine, tid, [task_id]).run_sync() == [False]
        assert maintenance_commands.purge(engine, tid, [task_id], before_ms=self.now * 2).run_sync() == [False]

    @rule(chosen=choice)
    def read_task(self, chosen: Choice) -> None:
        task = self._choose_task(chosen)
        model_task, answer = self.model.find(*task), self._send_once(queries.task(self.engine, *task))
        if not model_task:
            assert type(answer) is errors.TaskNotFound
            return
        task_read, result = answer
        self._assert_task_equals(task_read, model_task)
        assert (result and (model_task.status, result.result, result.error)) == model_task.answer

    # After every step

    @invariant()
    def redis_equals_the_model(self) -> None:
        snapshot = self.checked.check()
        self.cover("step")
        live = {model_task.id: model_task for model_task in self.model.tasks.values() if model_task.place != "deleted"}
        assert snapshot.tasks.keys() == live.keys()
        for model_task in live.values():
            _assert_stored_equals(snapshot, model_task)
        ready = {queue: ids for queue, ids in self.model.ready.items() if ids}
        assert {queue: ids for queue, ids in snapshot.ready.items() if ids} == ready
        assert snapshot.idem == {(tid, digest_key(key)): task_id for (tid, key), task_id in self.model.idem.items()}
        assert snapshot.expiry == {
            model_task.id: model_task.expires for model_task in live.values() if model_task.place in ("dlq", "terminal")
        }
        events = {
            task_id: [
                (int(e["attempt"]), e["outcome"], e["status"], int(e["attempts"]), e["worker"], e["error"])
                for e in entries
            ]
            for task_id, entries in snapshot.events.items()
        }
        assert events == {
            model_task.id: model_task.events for model_task in self.model.tasks.values() if model_task.events
        }

    @property
    def now(self) -> int:
        return self.clock.now_ms

    def cover(self, case: str, is_covered: bool = True) -> None:
        self.covered[case] += is_covered

    def cover_refusal(self, refusal: type[errors.CodeqError]) -> None:
        self.cover("task_cancelled" if refusal is errors.TaskCancelled else refusal.code)

    def _choose_task(self, chosen: Choice, *places: str) -> tuple[str, str]:
        """Select a task, in one of the places if requested and possible."""
        is_filtered, number = chosen
        tasks = list(self.model.tasks.values())
        if not tasks:
            return TID, "01890000-0000-7000-8000-000000000000"
        candidates = [model_task for model_task in tasks if model_task.place in places] if is_filtered else tasks
        model_task = (candidates or tasks)[number % len(candidates or tasks)]
        return model_task.tid, model_task.id

    def _choose_tasks(self, chosen: list[Choice], *places: str) -> tuple[str, list[str]]:
        tasks = [self._choose_task(selected, *places) for selected in chosen]
        return tasks[0][0], [task_id for _, task_id in tasks]

    def _choose_lease(self, chosen: Choice) -> Lease:
        is_filtered, number = chosen
        live = [
            lease
            for lease in self.leases
            if is_filtered
            and self.model.tasks[lease.id].token == lease.token
            and self.model.tasks[lease.id].place == "inprog"
        ]
        candidates = live or self.leases
        return candidates[number % len(candidates)]

    def _choose_lease_and_token(self, chosen: Choice, worker: str | None, token: str) -> tuple[Lease, str]:
        """Return a lease and a token; worker and token may be wrong."""
        lease = self._choose_lease(chosen)
        return Lease(
            lease.tid, lease.id, worker or lease.worker, lease.token
        ), lease.token if token == "mine" else token

    def _send(self, call: ScriptCall[Any], times: int) -> Iterator[Any]:
        """Yield the reply of each repetition, for the caller to compare with the model."""
        for _ in range(times):
            yield self._send_once(call)
        self.cover("call repeated", times > 1)

    def _send_once(self, call: ScriptCall[Any]) -> Any:
        try:
            return call.run_sync()
        except errors.CodeqError as error:
            return error

    def _count_ghosts(self) -> int:
        counts = [
            self.client.hvals(key_builders.of_tenant(root, tid).ghosts)
            for tid in (TID, OTHER_TID)
            for root in [key_builders.of_partition(self.engine.partition_of(tid)).root]
        ]
        return sum(int(count) for values in counts for count in values)

    def _assert_task_equals(self, task: Task, model_task: ModelTask) -> None:
        assert task.id == model_task.id
        assert (task.status, task.attempts, task.max_attempts) == (
            model_task.status,
            model_task.attempts,
            model_task.max,
        )
        assert (task.priority, task.created_ms, task.spec.command) == (
            model_task.priority,
            model_task.created,
            model_task.request.command,
        )
        assert task.error == (model_task.error or None)
        location = {
            "ready": Location.PENDING_LIST,
            "delayed": Location.DELAYED_ZSET,
            "inprog": Location.INPROG_SET,
            "dlq": Location.DLQ_SET,
            "terminal": Location.NONE,
        }[model_task.place]
        assert task.location is location
        if model_task.status is TaskStatus.PENDING:
            assert (task.visible_ms, task.worker) == (model_task.visible, None)


def _build_result(lease: Lease, status: TaskStatus, result: bytes, with_token: bool) -> NewResult:
    is_good = status is TaskStatus.COMPLETED
    return NewResult(
        task_id=lease.id,
        status=status,
        result=result if is_good else None,
        error=None if is_good else "boom",
        lease_token=lease.token if with_token else None,
    )


def _find_generated_ids(call: ScriptCall[Any], tasks: list[NewTask]) -> list[str]:
    """Return the ids that the engine has generated, in the order of the tasks.

    Later ids are greater, so sorting them gives that order, even if the call consists of several scripts.
    """
    ids: list[str] = []
    for script, (_, count, *words) in call.commands:
        at = count + len(script.header.args.fixed)
        ids += words[at :: len(script.header.args.repeated)]
    assert len(ids) == len(tasks)
    return sorted(ids)


def _assert_stored_equals(snapshot: Snapshot, model_task: ModelTask) -> None:
    task = snapshot.tasks[model_task.id]
    assert (task["status"].decode(), int(task.get("attempts", 0)), int(task.get("past", 0))) == (
        model_task.status,
        model_task.attempts,
        model_task.past,
    )
    place = f"ready {model_task.priority}" if model_task.place == "ready" else model_task.place
    assert set(snapshot.places[model_task.id]) == {place}
    if model_task.place in ("delayed", "inprog", "dlq"):
        score = {"delayed": model_task.visible, "inprog": model_task.deadline, "dlq": model_task.dead_since}[
            model_task.place
        ]
        assert snapshot.scores[model_task.id] == score
    assert task.get("progress", b"").decode() == model_task.progress
    if model_task.place == "inprog":
        assert task["lease"].decode() == f"{model_task.claimed} {model_task.token} {model_task.worker}"


def run_machine(client: redis.Redis, examples: int, steps: int, runner: Runner | None = None) -> Counter[str]:
    """Run random histories and return the cases they covered. CODEQ_TEST_SEED repeats a run."""
    seed = int(os.environ.get("CODEQ_TEST_SEED") or random.randrange(2**32))
    print(f"CODEQ_TEST_SEED={seed}")

    class Machine(QueueMachine):
        pass

    Machine.client, Machine.covered, Machine.runner = client, Counter(), runner  # type: ignore[assignment]
    run_state_machine_as_test(
        hypothesis.seed(seed)(lambda: Machine()),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=DirectoryBasedExampleDatabase(Path(".hypothesis") / "examples"),
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(Machine.covered))
    return Machine.covered
