"""One function a verb: what a transition needs, bound to its script, and what its answer means.

Inputs are valid here (`queues.services` checks them). A batch is the base case: every verb on tasks takes 1..1,000
of them, and answers in their order with a value or an error each.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, TypeVar

import msgspec
import uuid_utils

from codeq_site import errors
from queues.engine import keys, replies, scripts
from queues.engine.call import Call, Command, Runner
from queues.task import (
    Answer,
    Claimed,
    Enqueued,
    Lease,
    Location,
    NewResult,
    NewTask,
    Peeked,
    Place,
    QueueStats,
    Result,
    Returned,
    Spec,
    Status,
    Task,
)

R = TypeVar("R")
NOTHING: Mapping[str, int] = {}
# The most tasks in one script: bounds how long Redis answers nobody else, and stays below Lua's `unpack` limit.
CHUNK = 1000
# The most queues one claim looks at: ten lists each.
CLAIM_QUEUES = 100

encode_answer = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an installation decides about its queues. Times in milliseconds."""

    partitions: int = 16
    max_attempts: int = 5
    inspect_limit: int = 200
    backoff: str = "exp_full_jitter"
    backoff_base_ms: int = 5_000
    backoff_cap_ms: int = 900_000
    retention_ms: int = 86_400_000
    dead_retention_ms: int = 7 * 86_400_000
    horizon_ms: int = 366 * 86_400_000

    @property
    def backoff_line(self) -> str:
        return f"{self.backoff} {self.backoff_base_ms} {self.backoff_cap_ms}"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How often a tenant, and one of its tokens, may do one kind of thing. A rate of 0 is no limit."""

    what: str = ""
    per_second: float = 0
    burst_seconds: float = 2.0
    token: str = ""
    token_percent: int = 100

    def line(self, root: str, tid: str) -> str:
        """The buckets as the scripts read them: "<key> <ms a unit> <burst ms>" each."""
        return _buckets(self, root, tid) if self.per_second else ""


@lru_cache(maxsize=10_000)
def _buckets(limits: Limits, root: str, tid: str) -> str:
    price, burst = 1000 / limits.per_second, limits.burst_seconds * 1000
    buckets = [f"{keys.rate(root, tid, limits.what)} {price} {burst}"]
    if limits.token and limits.token_percent < 100:
        own = keys.rate(root, tid, limits.what, limits.token)
        buckets.append(f"{own} {price * 100 / limits.token_percent} {burst}")
    return " ".join(buckets)


NO_LIMITS = Limits()


class Engine:
    """The verbs. `clock` replaces Redis' own time, in tests only."""

    def __init__(self, runner: Runner, options: Options | None = None, clock: Callable[[], int] | None = None) -> None:
        self.runner = runner
        self.options = options or Options()
        self._clock = clock

    def enqueue(
        self,
        tid: str,
        tenant: str,
        tasks: Sequence[NewTask],
        *,
        retention_ms: int,
        retentions_ms: Mapping[str, int] = NOTHING,
        max_attempts: Mapping[str, int] = NOTHING,
        limits: Limits = NO_LIMITS,
        depth: int = 0,
    ) -> Call[list[Enqueued | errors.CodeqError]]:
        """Store tasks. One script for those that share a command and a priority, all in one round trip."""
        root = self._root(tid)
        groups: dict[tuple[str, int, int], list[tuple[int, str, Spec, list[Any]]]] = {}
        seen: dict[str, int] = {}
        for position, new in enumerate(tasks):
            task_id = str(uuid_utils.uuid7())
            spec = spec_of(new, tenant)
            digest = digest_of(new.idempotency_key)
            # A key that comes twice in a batch goes into a later script, which then finds the first one's task.
            repeat = seen[digest] = seen.get(digest, -1) + 1 if digest else 0
            blob = replies.encode_spec(spec)
            args = [
                task_id,
                blob,
                new.max_attempts or max_attempts.get(new.command, self.options.max_attempts),
                new.delay_ms,
                new.run_at_ms or 0,
                digest,
                fingerprint_of(new) if digest else "",
            ]
            group = groups.setdefault((new.command, new.priority, repeat), [])
            group.append((position, task_id, spec, args))
        # Whatever their queues: who came first with a key is stored before the next one asks for it.
        ordered = sorted(groups.items(), key=lambda group: group[0][2])
        script = scripts.load("enqueue")
        partition, commands = keys.of_partition(self.partition_of(tid)), []
        for (command, priority, _), items in ordered:
            queue = keys.of_queue(root, tid, command)
            bound = script.bind(
                ready=queue.ready[priority],
                delayed=queue.delayed,
                due=partition.due,
                queues=keys.of_tenant(root, tid).queues,
                tenants=partition.tenants,
                waiting=partition.waiting,
                woken=partition.woken,
                root=root,
                tid=tid,
                queue=queue.name,
                priority=priority,
                clock=self._now(),
                idem_ttl_ms=retentions_ms.get(command, retention_ms),
                horizon_ms=self.options.horizon_ms,
                limits=limits.line(root, tid),
                depth=depth or "",
                args=[value for item in items for value in item[3]],
            )
            commands.append((script, bound))

        def read(answers: list[Any]) -> list[Enqueued | errors.CodeqError]:
            done: list[Enqueued | errors.CodeqError | None] = [None] * len(tasks)
            for ((_, priority, _), items), (now_ms, wait_ms, *lines) in zip(ordered, answers, strict=True):
                for (position, task_id, spec, args), line in zip(items, lines, strict=True):
                    if isinstance(line, list):
                        done[position] = known_task(line)
                        continue
                    if isinstance(line, bytes):
                        done[position] = self._not_stored(line, wait_ms)
                        continue
                    done[position] = Enqueued(
                        task=Task(
                            id=task_id,
                            spec=spec,
                            priority=priority,
                            max_attempts=args[2],
                            status=Status.PENDING,
                            created_ms=now_ms,
                            updated_ms=now_ms,
                            visible_ms=line,
                            location=Location.DELAYED_ZSET if line > now_ms else Location.PENDING_LIST,
                        )
                    )
            return [item for item in done if item is not None]

        return Call(self.runner, commands, read)

    def _not_stored(self, word: bytes, wait_ms: int) -> errors.CodeqError:
        if word == b"LIMITED":
            return errors.TooMany(retry_after_seconds=wait_ms / 1000)
        if word == b"FULL":
            return errors.QueueFull(retry_after_seconds=5)
        return errors.InvalidRequest(f"runAt: at most {self.options.horizon_ms // 1000} seconds from now")

    def known(self, tid: str, tasks: Sequence[NewTask]) -> Call[list[Enqueued | None]]:
        """The tasks that these tasks' idempotency keys have made already, without sending the tasks."""
        args = [word for new in tasks for word in (digest_of(new.idempotency_key), fingerprint_of(new))]
        return self._call(
            "known",
            lambda lines: [known_task(line) if line else None for line in lines],
            due=self._partition(tid).due,
            root=self._root(tid),
            tid=tid,
            args=args,
        )

    def claim(
        self,
        tid: str,
        commands: Sequence[str],
        worker: str,
        *,
        lease_ms: int,
        limit: int,
        wait_ms: int = 0,
        dead_retention_ms: int | None = None,
        limits: Limits = NO_LIMITS,
        inspect_limit: int | None = None,
    ) -> Call[Claimed]:
        """Take up to `limit` tasks of at most CLAIM_QUEUES queues. `wait_ms`: the caller will wait for a wake-up."""
        root, partition = self._root(tid), self._partition(tid)
        token = secrets.token_hex(16)
        script = scripts.load("claim")
        lines = [keys.of_queue(root, tid, command).ready for command in commands]
        bound = script.bind(
            due=partition.due,
            queues=keys.of_tenant(root, tid).queues,
            ghosts=keys.of_tenant(root, tid).ghosts,
            waiting=partition.waiting,
            woken=partition.woken,
            events=partition.events,
            expiry=keys.of_tenant(root, tid).expiry,
            root=root,
            tid=tid,
            worker=worker,
            token=token,
            lease_ms=lease_ms,
            limit=limit,
            inspect_limit=self.options.inspect_limit if inspect_limit is None else inspect_limit,
            wait_ms=wait_ms,
            seed=_seed(),
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms or self.options.dead_retention_ms,
            clock=self._now(),
            limits=limits.line(root, tid),
            keys=[line[priority] for priority in reversed(keys.PRIORITIES) for line in lines],
            args=commands,
        )

        def read(answers: list[Any]) -> Claimed | Call[Claimed]:
            reply = answers[0]
            if reply[0] == b"LIMITED":
                raise errors.TooMany(retry_after_seconds=reply[1] / 1000)
            expired, dead = reply[3], reply[4]
            if reply[5]:  # only ghosts so far: walk on
                again = self.claim(
                    tid,
                    commands,
                    worker,
                    lease_ms=lease_ms,
                    limit=limit,
                    wait_ms=wait_ms,
                    dead_retention_ms=dead_retention_ms,
                    inspect_limit=0,  # this claim has repaired what one claim may
                )
                return again.then(
                    lambda claimed: msgspec.structs.replace(
                        claimed, expired=claimed.expired + expired, dead=claimed.dead + dead
                    )
                )
            return Claimed(
                tasks=replies.claimed_tasks(reply, worker, token),
                now_ms=reply[0],
                next_due_ms=int(reply[2]) or None,
                expired=expired,
                dead=dead,
            )

        return Call(self.runner, [(script, bound)], read)

    def heartbeat(
        self, tid: str, task_id: str, worker: str, *, extend_ms: int, token: str, progress: str
    ) -> Call[Lease]:
        return self._call(
            "heartbeat",
            lambda reply: Lease(task_id=task_id, until_ms=accepted(reply)[1]),
            due=self._partition(tid).due,
            root=self._root(tid),
            tid=tid,
            id=task_id,
            worker=worker,
            token=token,
            extend_ms=extend_ms,
            progress=progress,
            clock=self._now(),
        )

    def submit(
        self,
        tid: str,
        worker: str,
        results: Sequence[NewResult],
        *,
        retention_ms: int,
        retentions_ms: Mapping[str, int] = NOTHING,
    ) -> Call[list[Result | errors.CodeqError]]:
        """Hand in results; the same answer again gets the same result back."""
        args: list[Any] = []
        for new in results:
            answer = Answer(result=new.result, error=new.error, artifacts=new.artifacts)
            blob = encode_answer(answer)
            args += (new.task_id, new.status.value, new.lease_token or "", blob, new.error or "")

        def read(reply: list[Any]) -> list[Result | errors.CodeqError]:
            lines = zip(reply[1::3], reply[2::3], reply[3::3], strict=True)
            return [
                replies.refusal(line) or result_of(new, worker, line) for new, line in zip(results, lines, strict=True)
            ]

        return self._call(
            "submit",
            read,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            root=self._root(tid),
            tid=tid,
            worker=worker,
            retention_ms=retention_line(retention_ms, retentions_ms),
            clock=self._now(),
            args=args,
        )

    def nack(
        self,
        tid: str,
        task_id: str,
        worker: str,
        *,
        token: str,
        delay_ms: int | None,
        reason: str,
        dead_retention_ms: int,
    ) -> Call[Returned]:
        return self._call(
            "nack",
            returned,
            **self._return_keys(tid),
            id=task_id,
            worker=worker,
            token=token,
            delay_ms="" if delay_ms is None else delay_ms,
            reason=reason,
            seed=_seed(),
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms,
        )

    def abandon(self, tid: str, task_id: str, worker: str, *, token: str, dead_retention_ms: int) -> Call[Returned]:
        return self._call(
            "abandon",
            returned,
            **self._return_keys(tid),
            id=task_id,
            worker=worker,
            token=token,
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms,
        )

    def cancel(
        self, tid: str, task_id: str, *, retention_ms: int, retentions_ms: Mapping[str, int] = NOTHING
    ) -> Call[Task]:
        root, partition = self._root(tid), self._partition(tid)
        return self._call(
            "cancel",
            lambda reply: replies.shown_task(accepted(reply)[1:]),
            ghosts=keys.of_tenant(root, tid).ghosts,
            events=partition.events,
            expiry=keys.of_tenant(root, tid).expiry,
            root=root,
            tid=tid,
            id=task_id,
            retention_ms=retention_line(retention_ms, retentions_ms),
            clock=self._now(),
        )

    def promote(self, tid: str, command: str, limit: int = 500) -> Call[tuple[int, int]]:
        """Make due tasks ready: how many moved, and when the queue next has something due (0 = nothing)."""
        root, partition = self._root(tid), self._partition(tid)
        return self._call(
            "promote",
            lambda reply: (int(reply[0]), int(reply[1])),
            due=partition.due,
            waiting=partition.waiting,
            woken=partition.woken,
            root=root,
            queue=keys.of_queue(root, tid, command).name,
            limit=limit,
            clock=self._now(),
        )

    def reap(
        self, tid: str, command: str, limit: int = 500, *, dead_retention_ms: int | None = None
    ) -> Call[tuple[int, int, int]]:
        """Give back tasks whose lease is over: expired, of those dead, and when the queue next has something due."""
        root, partition = self._root(tid), self._partition(tid)
        return self._call(
            "reap",
            lambda reply: (int(reply[0]), int(reply[1]), int(reply[2])),
            due=partition.due,
            waiting=partition.waiting,
            woken=partition.woken,
            events=partition.events,
            expiry=keys.of_tenant(root, tid).expiry,
            root=root,
            queue=keys.of_queue(root, tid, command).name,
            limit=limit,
            seed=_seed(),
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms or self.options.dead_retention_ms,
            clock=self._now(),
        )

    def replay(
        self, tid: str, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
    ) -> Call[list[Task | errors.CodeqError]]:
        """Bring dead letters back in line, each with a new spec where `specs` has one."""
        blobs = [replies.encode_spec(spec) if spec else b"" for spec in specs] or [b""] * len(task_ids)
        return self._replay(
            tid,
            task_ids,
            blobs,
            "",
            lambda reply: [replies.refusal(line) or replies.shown_task(line[1:]) for line in reply],
        )

    def replay_for(self, tid: str, task_ids: Sequence[str], job: str) -> Call[list[errors.CodeqError | None]]:
        """The same for a job, each task once however often the job asks; what was wrong with each, or None."""
        return self._replay(
            tid, task_ids, [b""] * len(task_ids), job, lambda reply: [replies.refusal(line) for line in reply]
        )

    def recall(
        self, tid: str, task_ids: Sequence[str], job: str, *, dead_retention_ms: int
    ) -> Call[list[errors.CodeqError | None]]:
        """Take back what that job has replayed and nobody has claimed since; what was wrong with each, or None."""
        return self._call(
            "recall",
            lambda reply: [replies.refusal(line) for line in reply],
            ghosts=self._tenant(tid).ghosts,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            root=self._root(tid),
            tid=tid,
            job=job,
            dead_retention_ms=dead_retention_ms,
            clock=self._now(),
            args=task_ids,
        )

    def _replay(
        self, tid: str, task_ids: Sequence[str], blobs: Sequence[bytes], job: str, read: Callable[[Any], list[R]]
    ) -> Call[list[R]]:
        return self._call(
            "replay",
            read,
            ghosts=self._tenant(tid).ghosts,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            waiting=self._partition(tid).waiting,
            woken=self._partition(tid).woken,
            root=self._root(tid),
            tid=tid,
            job=job,
            clock=self._now(),
            args=[word for pair in zip(task_ids, blobs, strict=True) for word in pair],
        )

    def purge(self, tid: str, task_ids: Sequence[str], *, before_ms: int | None = None) -> Call[list[bool]]:
        """Remove ended tasks; with `before_ms`, only those whose retention was over by then. Which ones went."""
        return self._purge(tid, task_ids, before_ms, lambda reply: [flag == 1 for flag in reply])

    def purge_dead(self, tid: str, task_ids: Sequence[str]) -> Call[list[errors.CodeqError | None]]:
        """Remove dead letters and nothing else; what was wrong with each, or None."""
        words: dict[int, type[errors.CodeqError]] = {0: errors.NotDead, -1: errors.TaskNotFound}
        return self._purge(
            tid, task_ids, None, lambda reply: [words[flag]() if flag in words else None for flag in reply], only_dead=1
        )

    def _purge(
        self,
        tid: str,
        task_ids: Sequence[str],
        before_ms: int | None,
        read: Callable[[Any], list[R]],
        *,
        only_dead: int = 0,
    ) -> Call[list[R]]:
        return self._call(
            "purge",
            read,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            root=self._root(tid),
            tid=tid,
            before_ms="" if before_ms is None else before_ms,
            only_dead=only_dead,
            clock=self._now(),
            args=task_ids,
        )

    def expired(self, tid: str, *, before_ms: int | None = None, limit: int = CHUNK) -> Call[tuple[int, list[str]]]:
        """Redis' now, and the ended tasks whose retention is over."""
        return self._call(
            "expired",
            lambda reply: (int(reply[0]), [task_id.decode() for task_id in reply[1:]]),
            expiry=self._tenant(tid).expiry,
            before_ms="" if before_ms is None else before_ms,
            limit=limit,
            clock=self._now(),
        )

    def visits(self, partition: int, limit: int = CHUNK) -> Call[list[tuple[str, str]]]:
        """The queues of a partition in which something is due now: tid and command."""

        def read(reply: list[bytes]) -> list[tuple[str, str]]:
            return [(tid, command) for tid, _, command in (name.decode().partition(":") for name in reply)]

        return self._call("visits", read, due=keys.of_partition(partition).due, limit=limit, clock=self._now())

    def admit(self, tid: str, limits: Limits) -> Call[None]:
        """Count one request of a kind that no other script counts. TooMany when the limit is reached."""

        def read(wait_ms: int) -> None:
            if wait_ms:
                raise errors.TooMany(retry_after_seconds=wait_ms / 1000)

        root = self._root(tid)
        return self._call("admit", read, due=self._partition(tid).due, limits=limits.line(root, tid), clock=self._now())

    def pause(self, tid: str, command: str) -> Call[None]:
        return self._call(
            "pause",
            lambda _: None,
            queues=self._tenant(tid).queues,
            tenants=self._partition(tid).tenants,
            tid=tid,
            command=command,
        )

    def resume(self, tid: str, command: str) -> Call[None]:
        root, partition = self._root(tid), self._partition(tid)
        return self._call(
            "resume",
            lambda _: None,
            queues=keys.of_tenant(root, tid).queues,
            tenants=partition.tenants,
            waiting=partition.waiting,
            woken=partition.woken,
            root=root,
            tid=tid,
            queue=keys.of_queue(root, tid, command).name,
            command=command,
            clock=self._now(),
        )

    def policy(self, tid: str, command: str, *, line: str, max_consumers: int | None, topic: str = "") -> Call[None]:
        """What the scripts must know of a queue's policy; an empty line and no number is what holds everywhere."""
        return self._call(
            "policy",
            lambda _: None,
            queues=self._tenant(tid).queues,
            policies=self._tenant(tid).policies,
            tenants=self._partition(tid).tenants,
            tid=tid,
            command=command,
            line=line,
            most="" if max_consumers is None else max_consumers,
            topic=topic,
        )

    def task(self, tid: str, task_id: str, *, watch: bool = False) -> Call[tuple[Task, Answer | None]]:
        """One task and its answer. `watch`: the end of the task is to be announced on the wake channel."""

        def read(reply: list[Any]) -> tuple[Task, Answer | None]:
            if not reply:
                raise errors.TaskNotFound
            return replies.shown_task(reply[0]), decode_answer(reply[1]) if reply[1] else None

        return self._call(
            "task",
            read,
            due=self._partition(tid).due,
            root=self._root(tid),
            tid=tid,
            id=task_id,
            with_answer=1,
            watch=int(watch),
        )

    def stats(self, tid: str, commands: Sequence[str] = ()) -> Call[list[QueueStats]]:
        """What the named queues hold, or all queues of the tenant."""
        root = self._root(tid)

        def read(reply: list[Any]) -> list[QueueStats]:
            return [
                QueueStats(
                    command=command.decode(),
                    ready=sum(map(int, ready)),
                    delayed=delayed,
                    in_progress=inprog,
                    dlq=dlq,
                    is_paused=state.startswith(b"paused"),
                    oldest_ready_ms=int(oldest) or None,
                    ready_by_priority=[int(count) for count in ready],
                )
                for command, state, delayed, inprog, dlq, oldest, *ready in reply
            ]

        of = keys.of_tenant(root, tid)
        return self._call("stats", read, queues=of.queues, ghosts=of.ghosts, root=root, tid=tid, args=commands)

    def names(self, tid: str) -> Call[list[str]]:
        """The tenant's queues, by name."""
        return self._call(
            "names",
            lambda reply: sorted(name.decode() for name in reply),
            queues=self._tenant(tid).queues,
            tid=tid,
        )

    def scan(
        self, tid: str, command: str, place: str, at: str = "0", after: str = "", *, limit: int = CHUNK
    ) -> Call[list[tuple[str, str, str]]]:
        """Ids in one index of a queue (`ready:<0..9>`, `delayed`, `inprog`) behind the one seen last: each with where
        it stands, and the worker that has it in progress."""

        def read(reply: list[list[bytes]]) -> list[tuple[str, str, str]]:
            return [(task_id.decode(), at.decode(), replies.lease_parts(lease)[1]) for task_id, at, lease in reply]

        return self._call(
            "scan", read, queues=self._tenant(tid).queues, root=self._root(tid), tid=tid, command=command, place=place,
            at=at, after=after, limit=limit,
        )  # fmt: skip

    def tasks(self, tid: str, task_ids: Sequence[str]) -> Call[list[Task | None]]:
        """Tasks in one round trip; None for what is gone, or another tenant's."""
        script, due, root = scripts.load("task"), self._partition(tid).due, self._root(tid)
        return Call(
            self.runner,
            [
                (script, script.bind(due=due, root=root, tid=tid, id=task_id, with_answer=0, watch=0))
                for task_id in task_ids
            ],
            lambda answers: [replies.shown_task(reply[0]) if reply else None for reply in answers],
        )

    def peek(self, tid: str, command: str, limit: int) -> Call[Peeked]:
        """The next tasks of a queue, those in progress and those delayed: at most `limit` of each."""
        of = self._tenant(tid)
        return self._call(
            "peek", replies.peeked, queues=of.queues, ghosts=of.ghosts, root=self._root(tid), tid=tid,
            command=command, limit=limit,
        )  # fmt: skip

    def owner(self, task_id: str) -> Call[str | None]:
        """The tid of the tenant whose live task this is; every partition is asked, in one round trip."""
        script = scripts.load("owner")
        commands = []
        for partition in range(self.options.partitions):
            of = keys.of_partition(partition)
            commands.append((script, script.bind(due=of.due, root=of.root, id=task_id)))
        return Call(
            self.runner,
            commands,
            lambda queues: next((queue.decode().partition(":")[0] for queue in queues if queue), None),
        )

    def place(self, tid: str, task_id: str) -> Call[Place]:
        """Where a task stands in its queue, and in what state that is."""

        def read(reply: list[Any]) -> Place:
            if not reply:
                raise errors.TaskNotFound
            now_ms, state, busy, higher, ahead, awaited_until = reply
            word, _, most = state.partition(b" ")
            return Place(
                now_ms=now_ms,
                is_paused=word == b"paused",
                is_busy=bool(most) and busy >= int(most),
                in_progress=busy,
                higher=higher,
                ahead=None if ahead < 0 else ahead,
                is_awaited=float(awaited_until) > now_ms,
            )

        of = self._tenant(tid)
        return self._call(
            "place", read, queues=of.queues, ghosts=of.ghosts, waiting=self._partition(tid).waiting,
            root=self._root(tid), tid=tid, id=task_id, clock=self._now(),
        )  # fmt: skip

    def partition_of(self, tid: str) -> int:
        return keys.partition_of(tid, self.options.partitions)

    def _call(self, verb: str, read: Callable[[Any], R], **named: Any) -> Call[R]:
        script = scripts.load(verb)
        command: Command = (script, script.bind(**named))
        return Call(self.runner, [command], lambda answers: read(answers[0]))

    def _partition(self, tid: str) -> keys.PartitionKeys:
        return keys.of_partition(self.partition_of(tid))

    def _tenant(self, tid: str) -> keys.TenantKeys:
        return keys.of_tenant(self._root(tid), tid)

    def _root(self, tid: str) -> str:
        return self._partition(tid).root

    def _now(self) -> int | str:
        return self._clock() if self._clock else ""

    def _return_keys(self, tid: str) -> dict[str, Any]:
        partition = self._partition(tid)
        return {
            "due": partition.due,
            "waiting": partition.waiting,
            "woken": partition.woken,
            "events": partition.events,
            "expiry": self._tenant(tid).expiry,
            "root": partition.root,
            "tid": tid,
            "clock": self._now(),
        }


def spec_of(new: NewTask, tenant: str) -> Spec:
    return Spec(
        command=new.command,
        payload=new.payload,
        tenant=tenant,
        webhook=new.webhook,
        trace_parent=new.trace_parent,
        trace_state=new.trace_state,
    )


def retention_line(retention_ms: int, retentions_ms: Mapping[str, int]) -> str | int:
    """How long what has ended stays, as `lua/lib/retention.lua` reads it."""
    if not retentions_ms:
        return retention_ms
    return "".join([f"{retention_ms}", *(f" {command}={each}" for command, each in retentions_ms.items())])


def digest_of(key: str | None) -> str:
    return sha256(key.encode()).hexdigest() if key else ""


def fingerprint_of(new: NewTask) -> str:
    """What makes two requests with one idempotency key the same request: all that the producer asked for."""
    asked = (
        new.command,
        new.payload,
        new.priority if new.is_priority_said else 0,  # the policy's word is not the producer's
        new.max_attempts,
        new.webhook,
        new.run_at_ms,
        new.delay_ms,
    )
    return blake2b(msgspec.msgpack.encode(asked), digest_size=16).hexdigest()


def known_task(line: Sequence[Any]) -> Enqueued:
    return Enqueued(task=replies.shown_task(line[1:]), is_replayed=True, is_mismatch=line[0] == 0)


def accepted(reply: Sequence[Any]) -> Sequence[Any]:
    """The reply, unless its first word is a refusal."""
    error = replies.refusal(reply)
    if error:
        raise error
    return reply


def returned(reply: Sequence[Any]) -> Returned:
    status, delay_ms = accepted(reply)
    return Returned(is_dead=status == b"FAILED", delay_ms=int(delay_ms))


def result_of(new: NewResult, worker: str, line: Sequence[Any]) -> Result:
    return Result(
        task_id=new.task_id,
        status=new.status,
        worker=worker,
        completed_ms=int(line[1]),
        attempts=int(line[2]),
        result=msgspec.Raw(new.result) if new.result is not None else None,
        error=new.error,
        artifacts=msgspec.Raw(new.artifacts) if new.artifacts is not None else None,
    )


def _seed() -> int:
    return random.getrandbits(31)
