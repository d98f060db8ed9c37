"""A model of queues in plain Python, with which `test_model.py` compares the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core import errors
from queues.domain import NewResult, NewTask, Status
from queues.engine.options import Options

Refusal = type[errors.CodeqError]
Queue = tuple[str, str]


@dataclass
class Job:
    id: str
    tid: str
    command: str
    priority: int
    max: int
    request: NewTask
    created: int
    visible: int
    place: str = "ready"  # delayed inprog dlq terminal gone
    status: Status = Status.PENDING
    attempts: int = 0
    past: int = 0
    worker: str = ""
    token: str = ""
    deadline: int = 0
    claimed: int = 0
    error: str = ""
    progress: str = ""
    answer: tuple[Status, bytes | None, str | None] | None = None
    ended: int = 0
    expires: int = 0
    dead_since: int = 0
    replayed_by: str = ""  # the bulk job of the last replay
    was_forwarded: bool = False  # to the dead letter queue
    events: list[tuple[int, str, str, int, str, str]] = field(default_factory=list)

    @property
    def queue(self) -> Queue:
        return self.tid, self.command


@dataclass(frozen=True)
class Lease:
    tid: str
    id: str
    worker: str
    token: str


class Model:
    def __init__(self, options: Options, retention_ms: int, dead_retention_ms: int) -> None:
        self.options = options
        self.retention_ms, self.dead_retention_ms = retention_ms, dead_retention_ms
        self.jobs: dict[str, Job] = {}
        self.lines: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        self.idem: dict[tuple[str, str], str] = {}
        self.paused: dict[Queue, bool] = {}
        self.policies: dict[Queue, tuple[str, int, int, str]] = {}
        self.max_consumers: dict[Queue, int] = {}  # only of queues with a limit

    # Reads

    def find(self, tid: str, task_id: str) -> Job | None:
        job = self.jobs.get(task_id)
        return job if job and job.tid == tid and job.place != "gone" else None

    def of(self, queue: Queue, place: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.queue == queue and job.place == place]

    def first_due(self, queue: Queue) -> int | None:
        times = [job.visible for job in self.of(queue, "delayed")] + [job.deadline for job in self.of(queue, "inprog")]
        return min(times, default=None)

    # Producers

    def enqueue(self, tid: str, tasks: Sequence[NewTask], ids: Sequence[str], now: int) -> list[Any]:
        """Return (id, existed, differs) or an error class for each task."""
        answers: list[Any] = [None] * len(tasks)
        seen: dict[str, int] = {}
        order = []
        for at, new in enumerate(tasks):
            key = new.idempotency_key
            repeat = seen[key] = seen.get(key, -1) + 1 if key else 0  # type: ignore[index]
            order.append((repeat, at))
        for _, at in sorted(order):
            answers[at] = self._enqueue_one(tid, tasks[at], ids[at], now)
        return answers

    def _enqueue_one(self, tid: str, new: NewTask, task_id: str, now: int) -> Any:
        existing_id = self.idem.get((tid, new.idempotency_key)) if new.idempotency_key else None
        if existing_id and existing_id != task_id:
            return existing_id, True, self.jobs[existing_id].request != new
        if task_id in self.jobs:
            return task_id, False, False
        visible = max(now, new.run_at_ms or now + new.delay_ms)
        if visible - now > self.options.horizon_ms:
            return errors.InvalidRequest
        job = self.jobs[task_id] = Job(
            id=task_id,
            tid=tid,
            command=new.command,
            priority=new.priority,
            max=new.max_attempts or self.options.max_attempts,
            request=new,
            created=now,
            visible=visible,
        )
        if new.idempotency_key:
            self.idem[tid, new.idempotency_key] = task_id
        self.paused.setdefault(job.queue, False)
        if visible > now:
            job.place = "delayed"
        else:
            self._make_ready(job)
        return task_id, False, False

    def cancel(self, tid: str, task_id: str, now: int) -> Refusal | None:
        job = self.find(tid, task_id)
        if not job:
            return errors.TaskNotFound
        if job.status is Status.CANCELLED:
            return None
        if job.status.is_terminal:
            return errors.AlreadyEnded
        attempt = job.past + job.attempts + 1 if job.status is Status.IN_PROGRESS else 0
        self._leave(job)
        job.place, job.status, job.ended, job.expires = "terminal", Status.CANCELLED, now, now + self.retention_ms
        self._record_event(job, attempt, "CANCELLED", job.worker if attempt else "", "")
        return None

    # Workers

    def claim(self, tid: str, commands: Sequence[str], limit: int, now: int) -> list[Job]:
        """Return the claimed jobs in order; `lease` then sets their leases."""
        active = [command for command in commands if self.paused.get((tid, command)) is False]
        budget = self.options.repair_limit
        free_slots: dict[str, float] = {}
        for command in active:
            queue = (tid, command)
            if budget > 0:
                promoted = self.promote(queue, budget, now)
                reaped, _ = self.reap(queue, budget, now)
                budget -= max(promoted, reaped)
            free_slots[command] = self.max_consumers.get(queue, float("inf")) - len(self.of(queue, "inprog"))
        taken: list[Job] = []
        for priority in range(9, -1, -1):
            for command in active:
                line = self.lines[tid, command, priority]
                while line and len(taken) < limit and free_slots[command] > 0:
                    taken.append(self.jobs[line.pop(0)])
                    free_slots[command] -= 1
        return taken

    def lease(self, job: Job, worker: str, token: str, now: int, lease_ms: int) -> None:
        job.place, job.status = "inprog", Status.IN_PROGRESS
        job.worker, job.token, job.claimed, job.deadline = worker, token, now, now + lease_ms

    def refusal(self, tid: str, task_id: str, worker: str, token: str, now: int) -> Refusal | None:
        job = self.find(tid, task_id)
        if not job:
            return errors.TaskNotFound
        if job.status is Status.CANCELLED:
            return errors.TaskCancelled
        if job.status.is_terminal:
            return errors.AlreadyEnded
        if job.status is Status.PENDING:
            return errors.LeaseLost
        if job.worker != worker:
            return errors.NotLeaseOwner
        if (token and job.token != token) or job.deadline <= now:
            return errors.LeaseLost
        return None

    def heartbeat(self, lease: Lease, token: str, extend_ms: int, progress: str, now: int) -> Refusal | int:
        refused = self.refusal(lease.tid, lease.id, lease.worker, token, now)
        if refused:
            return refused
        job = self.jobs[lease.id]
        job.deadline = now + extend_ms
        job.progress = progress or job.progress
        return job.deadline

    def submit(self, tid: str, worker: str, results: Sequence[NewResult], now: int) -> list[Any]:
        """Store results. All leases of the batch are checked before the first result is stored."""
        refused = [self.refusal(tid, new.task_id, worker, new.lease_token or "", now) for new in results]
        return [self._submit_one(worker, new, why, now) for new, why in zip(results, refused, strict=True)]

    def _submit_one(self, worker: str, new: NewResult, refused: Refusal | None, now: int) -> Any:
        job, answer = self.jobs.get(new.task_id), (new.status, new.result, new.error)
        if not job:
            return refused
        if job.answer and refused in (None, errors.AlreadyEnded):
            is_same = job.worker == worker and job.answer == answer
            return (job.ended, job.attempts) if is_same else errors.AlreadyEnded
        if refused:
            return refused
        attempt = job.past + job.attempts + 1
        job.attempts += new.status is Status.FAILED
        job.place, job.status, job.error, job.answer = "terminal", new.status, new.error or "", answer
        job.ended, job.expires = now, now + self.retention_ms
        self._record_event(job, attempt, new.status.value, worker, new.error or "")
        return now, job.attempts

    def nack(self, lease: Lease, token: str, delay_ms: int | None, reason: str, now: int) -> Any:
        refused = self.refusal(lease.tid, lease.id, lease.worker, token, now)
        return refused or self._end_attempt(self.jobs[lease.id], "NACKED", reason, delay_ms, now)

    def abandon(self, lease: Lease, token: str, now: int) -> Any:
        refused = self.refusal(lease.tid, lease.id, lease.worker, token, now)
        return refused or self._end_attempt(self.jobs[lease.id], "ABANDONED", "", 0, now)

    def _end_attempt(self, job: Job, outcome: str, reason: str, delay_ms: int | None, now: int) -> tuple[bool, int]:
        """End an attempt without success; return whether the job is dead, and its delay."""
        own_error = reason or ("LEASE_EXPIRED" if outcome == "EXPIRED" else "")
        job.attempts += 1
        attempt = job.past + job.attempts
        worker = job.worker
        if job.attempts >= job.max and self._forward_dead(job, outcome, own_error, now):
            return False, 0
        if job.attempts >= job.max:
            job.place, job.status, job.error = "dlq", Status.FAILED, own_error or "MAX_ATTEMPTS"
            job.dead_since, job.expires = now, now + self.dead_retention_ms
            self._record_event(job, attempt, outcome, worker, own_error)
            return True, 0
        if delay_ms is None:
            delay_ms = self.backoff_ms(job)
        job.status, job.visible, job.error = Status.PENDING, now + delay_ms, own_error or job.error
        self._record_event(job, attempt, outcome, worker, own_error)
        if delay_ms > 0:
            job.place = "delayed"
        else:
            self._make_ready(job)
        return False, delay_ms

    def _forward_dead(self, job: Job, outcome: str, own_error: str, now: int) -> bool:
        """Move a dead job to its dead letter queue, with all its attempts; once per job."""
        topic = self._policy(job.queue)[3]
        if not topic or job.was_forwarded:
            return False
        job.past, job.attempts, attempt = job.past + job.attempts, 0, job.past + job.attempts
        job.status, job.visible, job.error = Status.PENDING, now, own_error or "MAX_ATTEMPTS"
        self._record_event(job, attempt, outcome, job.worker, own_error)
        job.command, job.was_forwarded = topic, True
        self._make_ready(job)
        return True

    def _policy(self, queue: Queue) -> tuple[str, int, int, str]:
        options = self.options
        return self.policies.get(queue, (options.backoff, options.backoff_base_ms, options.backoff_cap_ms, ""))

    def backoff_ms(self, job: Job) -> int:
        """Return the delay of a policy without jitter."""
        policy, base, cap, _ = self._policy(job.queue)
        factor = {"fixed": 1, "linear": job.attempts, "exponential": 2 ** (job.attempts - 1)}[policy]
        return int(min(base * factor, cap))

    # Periodic tasks and operators

    def promote(self, queue: Queue, limit: int, now: int) -> int:
        due = sorted((job.visible, job.id) for job in self.of(queue, "delayed") if job.visible <= now)[:limit]
        for _, task_id in due:
            self._make_ready(self.jobs[task_id])
        return len(due)

    def reap(self, queue: Queue, limit: int, now: int) -> tuple[int, int]:
        expired = sorted((job.deadline, job.id) for job in self.of(queue, "inprog") if job.deadline <= now)[:limit]
        dead = [self._end_attempt(self.jobs[task_id], "EXPIRED", "", None, now)[0] for _, task_id in expired]
        return len(expired), sum(dead)

    def replay(self, tid: str, task_ids: Sequence[str], now: int) -> list[Refusal | None]:
        return [self._replay_one(tid, task_id, now) for task_id in task_ids]

    def _replay_one(self, tid: str, task_id: str, now: int) -> Refusal | None:
        job = self.find(tid, task_id)
        if not job:
            return errors.TaskNotFound
        if job.place != "dlq":
            return errors.NotDead
        job.past, job.attempts, job.status, job.visible, job.expires = (
            job.past + job.attempts,
            0,
            Status.PENDING,
            now,
            0,
        )
        job.replayed_by = ""
        self._record_event(job, 0, "REPLAYED", "", "")
        self._make_ready(job)
        return None

    def replay_for(self, tid: str, task_ids: Sequence[str], job_id: str, now: int) -> list[Refusal | None]:
        """Replay for a bulk job, which may repeat the call."""
        answers = []
        for task_id in task_ids:
            job = self.find(tid, task_id)
            if job and job.replayed_by == job_id:
                answers.append(None)
                continue
            answers.append(self._replay_one(tid, task_id, now))
            if job and not answers[-1]:
                job.replayed_by = job_id
        return answers

    def purge_dead(self, tid: str, task_ids: Sequence[str]) -> list[Refusal | None]:
        answers: list[Refusal | None] = []
        for task_id in task_ids:
            job = self.find(tid, task_id)
            if job and job.place == "dlq":
                self.purge(tid, [task_id])
                answers.append(None)
            else:
                answers.append(errors.NotDead if job else errors.TaskNotFound)
        return answers

    def purge(self, tid: str, task_ids: Sequence[str], before_ms: int | None = None) -> list[bool]:
        deleted = []
        for task_id in task_ids:
            job = self.find(tid, task_id)
            is_deleted = bool(job and job.status.is_terminal and (before_ms is None or job.expires <= before_ms))
            deleted.append(is_deleted)
            if job and is_deleted:
                if job.place == "dlq":
                    job.events.append((0, "PURGED", "GONE", job.attempts, "", ""))
                job.place = "gone"
                key = job.request.idempotency_key
                if key and self.idem.get((tid, key)) == task_id:
                    del self.idem[tid, key]
        return deleted

    def _make_ready(self, job: Job) -> None:
        job.place = "ready"
        self.lines[job.tid, job.command, job.priority].append(job.id)

    def _leave(self, job: Job) -> None:
        if job.place == "ready":
            self.lines[job.tid, job.command, job.priority].remove(job.id)

    def _record_event(self, job: Job, attempt: int, outcome: str, worker: str, error: str) -> None:
        job.events.append((attempt, outcome, job.status.value, job.attempts, worker, error))
