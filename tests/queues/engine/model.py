"""A model of queues in plain Python, with which `test_model.py` compares the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core import errors
from queues.domain import NewResult, NewTask, TaskStatus
from queues.engine.options import Options

Refusal = type[errors.CodeqError]
Queue = tuple[str, str]


@dataclass
class ModelTask:
    """A task of the model. `past` counts the attempts before its last replay or forwarding."""

    id: str
    tid: str
    command: str
    priority: int
    max: int
    request: NewTask
    created: int
    visible: int
    place: str = "ready"  # delayed inprog dlq terminal deleted
    status: TaskStatus = TaskStatus.PENDING
    attempts: int = 0
    past: int = 0
    worker: str = ""
    token: str = ""
    deadline: int = 0
    claimed: int = 0
    error: str = ""
    progress: str = ""
    answer: tuple[TaskStatus, bytes | None, str | None] | None = None
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
    """The task, the worker and the token that a claim returned."""

    tid: str
    id: str
    worker: str
    token: str


class Model:
    """Queues in plain Python.

    A command returns the expected values of the engine's reply, or the class of the expected error.
    """

    def __init__(self, options: Options, retention_ms: int, dead_retention_ms: int) -> None:
        self.options = options
        self.retention_ms, self.dead_retention_ms = retention_ms, dead_retention_ms
        self.tasks: dict[str, ModelTask] = {}
        self.ready: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        self.idem: dict[tuple[str, str], str] = {}
        self.paused: dict[Queue, bool] = {}
        self.policies: dict[Queue, tuple[str, int, int, str]] = {}
        self.max_consumers: dict[Queue, int] = {}  # only of queues with a limit

    # Reads

    def find(self, tid: str, task_id: str) -> ModelTask | None:
        task = self.tasks.get(task_id)
        return task if task and task.tid == tid and task.place != "deleted" else None

    def list_tasks(self, queue: Queue, place: str) -> list[ModelTask]:
        return [task for task in self.tasks.values() if task.queue == queue and task.place == place]

    def first_due(self, queue: Queue) -> int | None:
        times = [task.visible for task in self.list_tasks(queue, "delayed")]
        times += [task.deadline for task in self.list_tasks(queue, "inprog")]
        return min(times, default=None)

    # Producers

    def enqueue(self, tid: str, tasks: Sequence[NewTask], ids: Sequence[str], now: int) -> list[Any]:
        """Return (id, is_repeated, is_mismatch) or an error class for each task."""
        outcomes: list[Any] = [None] * len(tasks)
        repeats: dict[str, int] = {}
        order = []
        for position, new in enumerate(tasks):
            key = new.idempotency_key
            repeat = repeats[key] = repeats.get(key, -1) + 1 if key else 0  # type: ignore[index]
            order.append((repeat, position))
        for _, position in sorted(order):
            outcomes[position] = self._enqueue_one(tid, tasks[position], ids[position], now)
        return outcomes

    def _enqueue_one(self, tid: str, new: NewTask, task_id: str, now: int) -> Any:
        existing_id = self.idem.get((tid, new.idempotency_key)) if new.idempotency_key else None
        if existing_id and existing_id != task_id:
            return existing_id, True, self.tasks[existing_id].request != new
        if task_id in self.tasks:
            return task_id, False, False
        visible = max(now, new.run_at_ms or now + new.delay_ms)
        if visible - now > self.options.horizon_ms:
            return errors.InvalidRequest
        task = self.tasks[task_id] = ModelTask(
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
        self.paused.setdefault(task.queue, False)
        if visible > now:
            task.place = "delayed"
        else:
            self._make_ready(task)
        return task_id, False, False

    def cancel(self, tid: str, task_id: str, now: int) -> Refusal | None:
        task = self.find(tid, task_id)
        if not task:
            return errors.TaskNotFound
        if task.status is TaskStatus.CANCELLED:
            return None
        if task.status.is_terminal:
            return errors.AlreadyEnded
        attempt = task.past + task.attempts + 1 if task.status is TaskStatus.IN_PROGRESS else 0
        self._remove_from_ready(task)
        task.place, task.status, task.ended, task.expires = (
            "terminal",
            TaskStatus.CANCELLED,
            now,
            now + self.retention_ms,
        )
        self._record_event(task, attempt, "CANCELLED", task.worker if attempt else "", "")
        return None

    # Workers

    def claim(self, tid: str, commands: Sequence[str], limit: int, now: int) -> list[ModelTask]:
        """Return the claimed tasks in order; `lease` then sets their leases."""
        active = [command for command in commands if self.paused.get((tid, command)) is False]
        budget = self.options.repair_limit
        free_slots: dict[str, float] = {}
        for command in active:
            queue = (tid, command)
            if budget > 0:
                promoted = self.promote(queue, budget, now)
                reaped, _ = self.reap(queue, budget, now)
                budget -= max(promoted, reaped)
            free_slots[command] = self.max_consumers.get(queue, float("inf")) - len(self.list_tasks(queue, "inprog"))
        claimed: list[ModelTask] = []
        for priority in range(9, -1, -1):
            for command in active:
                ready = self.ready[tid, command, priority]
                while ready and len(claimed) < limit and free_slots[command] > 0:
                    claimed.append(self.tasks[ready.pop(0)])
                    free_slots[command] -= 1
        return claimed

    def lease(self, task: ModelTask, worker: str, token: str, now: int, lease_ms: int) -> None:
        task.place, task.status = "inprog", TaskStatus.IN_PROGRESS
        task.worker, task.token, task.claimed, task.deadline = worker, token, now, now + lease_ms

    def find_refusal(self, tid: str, task_id: str, worker: str, token: str, now: int) -> Refusal | None:
        task = self.find(tid, task_id)
        if not task:
            return errors.TaskNotFound
        if task.status is TaskStatus.CANCELLED:
            return errors.TaskCancelled
        if task.status.is_terminal:
            return errors.AlreadyEnded
        if task.status is TaskStatus.PENDING:
            return errors.LeaseLost
        if task.worker != worker:
            return errors.NotLeaseOwner
        if (token and task.token != token) or task.deadline <= now:
            return errors.LeaseLost
        return None

    def heartbeat(self, lease: Lease, token: str, extend_ms: int, progress: str, now: int) -> Refusal | int:
        refusal = self.find_refusal(lease.tid, lease.id, lease.worker, token, now)
        if refusal:
            return refusal
        task = self.tasks[lease.id]
        task.deadline = now + extend_ms
        task.progress = progress or task.progress
        return task.deadline

    def submit(self, tid: str, worker: str, results: Sequence[NewResult], now: int) -> list[Any]:
        """Store results. All leases of the batch are checked before the first result is stored."""
        workers = [new.worker or worker for new in results]
        refusals = [
            self.find_refusal(tid, new.task_id, holder, new.lease_token or "", now)
            for new, holder in zip(results, workers, strict=True)
        ]
        return [self._submit_one(*item, now) for item in zip(workers, results, refusals, strict=True)]

    def _submit_one(self, worker: str, new: NewResult, refusal: Refusal | None, now: int) -> Any:
        task, answer = self.tasks.get(new.task_id), (new.status, new.result, new.error)
        if not task:
            return refusal
        if task.answer and refusal in (None, errors.AlreadyEnded):
            is_same = task.worker == worker and task.answer == answer
            return (task.ended, task.attempts) if is_same else errors.AlreadyEnded
        if refusal:
            return refusal
        attempt = task.past + task.attempts + 1
        task.attempts += new.status is TaskStatus.FAILED
        task.place, task.status, task.error, task.answer = "terminal", new.status, new.error or "", answer
        task.ended, task.expires = now, now + self.retention_ms
        self._record_event(task, attempt, new.status.value, worker, new.error or "")
        return now, task.attempts

    def nack(self, lease: Lease, token: str, delay_ms: int | None, reason: str, now: int) -> Any:
        refusal = self.find_refusal(lease.tid, lease.id, lease.worker, token, now)
        return refusal or self._end_attempt(self.tasks[lease.id], "NACKED", reason, delay_ms, now)

    def abandon(self, lease: Lease, token: str, now: int) -> Any:
        refusal = self.find_refusal(lease.tid, lease.id, lease.worker, token, now)
        return refusal or self._end_attempt(self.tasks[lease.id], "ABANDONED", "", 0, now)

    def _end_attempt(
        self, task: ModelTask, outcome: str, reason: str, delay_ms: int | None, now: int
    ) -> tuple[bool, int]:
        """End an attempt without success; return whether the task is dead, and its delay."""
        own_error = reason or ("LEASE_EXPIRED" if outcome == "EXPIRED" else "")
        task.attempts += 1
        attempt = task.past + task.attempts
        worker = task.worker
        if task.attempts >= task.max and self._forward_dead(task, outcome, own_error, now):
            return False, 0
        if task.attempts >= task.max:
            task.place, task.status, task.error = "dlq", TaskStatus.FAILED, own_error or "MAX_ATTEMPTS"
            task.dead_since, task.expires = now, now + self.dead_retention_ms
            self._record_event(task, attempt, outcome, worker, own_error)
            return True, 0
        if delay_ms is None:
            delay_ms = self.backoff_ms(task)
        task.status, task.visible, task.error = TaskStatus.PENDING, now + delay_ms, own_error or task.error
        self._record_event(task, attempt, outcome, worker, own_error)
        if delay_ms > 0:
            task.place = "delayed"
        else:
            self._make_ready(task)
        return False, delay_ms

    def _forward_dead(self, task: ModelTask, outcome: str, own_error: str, now: int) -> bool:
        """Move a dead task to its dead letter queue, where it has all its attempts again.

        Return False if there is no such queue, or if the task was moved before.
        """
        dead_letter_queue = self._policy(task.queue)[3]
        if not dead_letter_queue or task.was_forwarded:
            return False
        task.past, task.attempts, attempt = task.past + task.attempts, 0, task.past + task.attempts
        task.status, task.visible, task.error = TaskStatus.PENDING, now, own_error or "MAX_ATTEMPTS"
        self._record_event(task, attempt, outcome, task.worker, own_error)
        task.command, task.was_forwarded = dead_letter_queue, True
        self._make_ready(task)
        return True

    def _policy(self, queue: Queue) -> tuple[str, int, int, str]:
        options = self.options
        return self.policies.get(queue, (options.backoff, options.backoff_base_ms, options.backoff_cap_ms, ""))

    def backoff_ms(self, task: ModelTask) -> int:
        """Return the delay of a policy without jitter."""
        policy, base, cap, _ = self._policy(task.queue)
        factor = {"fixed": 1, "linear": task.attempts, "exponential": 2 ** (task.attempts - 1)}[policy]
        return int(min(base * factor, cap))

    # Periodic tasks and operators

    def promote(self, queue: Queue, limit: int, now: int) -> int:
        delayed = sorted((task.visible, task.id) for task in self.list_tasks(queue, "delayed"))
        due = [task_id for visible, task_id in delayed if visible <= now][:limit]
        for task_id in due:
            self._make_ready(self.tasks[task_id])
        return len(due)

    def reap(self, queue: Queue, limit: int, now: int) -> tuple[int, int]:
        leased = sorted((task.deadline, task.id) for task in self.list_tasks(queue, "inprog"))
        expired = [task_id for deadline, task_id in leased if deadline <= now][:limit]
        dead = [self._end_attempt(self.tasks[task_id], "EXPIRED", "", None, now)[0] for task_id in expired]
        return len(expired), sum(dead)

    def replay(self, tid: str, task_ids: Sequence[str], now: int) -> list[Refusal | None]:
        return [self._replay_one(tid, task_id, now) for task_id in task_ids]

    def _replay_one(self, tid: str, task_id: str, now: int) -> Refusal | None:
        task = self.find(tid, task_id)
        if not task:
            return errors.TaskNotFound
        if task.place != "dlq":
            return errors.NotDead
        task.past, task.attempts = task.past + task.attempts, 0
        task.status, task.visible, task.expires = TaskStatus.PENDING, now, 0
        task.replayed_by = ""
        self._record_event(task, 0, "REPLAYED", "", "")
        self._make_ready(task)
        return None

    def replay_for(self, tid: str, task_ids: Sequence[str], job_id: str, now: int) -> list[Refusal | None]:
        """Replay for a bulk job, which may repeat the call."""
        answers = []
        for task_id in task_ids:
            task = self.find(tid, task_id)
            if task and task.replayed_by == job_id:
                answers.append(None)
                continue
            answers.append(self._replay_one(tid, task_id, now))
            if task and not answers[-1]:
                task.replayed_by = job_id
        return answers

    def purge_dead(self, tid: str, task_ids: Sequence[str]) -> list[Refusal | None]:
        answers: list[Refusal | None] = []
        for task_id in task_ids:
            task = self.find(tid, task_id)
            if task and task.place == "dlq":
                self.purge(tid, [task_id])
                answers.append(None)
            else:
                answers.append(errors.NotDead if task else errors.TaskNotFound)
        return answers

    def purge(self, tid: str, task_ids: Sequence[str], before_ms: int | None = None) -> list[bool]:
        deleted = []
        for task_id in task_ids:
            task = self.find(tid, task_id)
            is_deleted = bool(task and task.status.is_terminal and (before_ms is None or task.expires <= before_ms))
            deleted.append(is_deleted)
            if task and is_deleted:
                if task.place == "dlq":
                    task.events.append((0, "PURGED", "GONE", task.attempts, "", ""))
                task.place = "deleted"
                key = task.request.idempotency_key
                if key and self.idem.get((tid, key)) == task_id:
                    del self.idem[tid, key]
        return deleted

    def _make_ready(self, task: ModelTask) -> None:
        task.place = "ready"
        self.ready[task.tid, task.command, task.priority].append(task.id)

    def _remove_from_ready(self, task: ModelTask) -> None:
        if task.place == "ready":
            self.ready[task.tid, task.command, task.priority].remove(task.id)

    def _record_event(self, task: ModelTask, attempt: int, outcome: str, worker: str, error: str) -> None:
        task.events.append((attempt, outcome, task.status.value, task.attempts, worker, error))
