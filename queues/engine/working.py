"""A worker's verbs: claim, and what ends a claim."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from codeq_site import errors
from queues.engine import keys, replies, scripts
from queues.engine.call import Call
from queues.engine.options import NO_LIMITS, Limits
from queues.engine.verbs import NOTHING, Verbs, retention_line, seed
from queues.task import Answer, Claimed, Lease, NewResult, Result, Returned


class Working(Verbs):
    """Claim, heartbeat, submit, nack and abandon."""

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
        partition = self._partition(tid)
        root, tenant = partition.root, keys.of_tenant(partition.root, tid)
        token = secrets.token_hex(16)
        script = scripts.load("claim")
        bound = script.bind(
            due=partition.due,
            queues=tenant.queues,
            ghosts=tenant.ghosts,
            waiting=partition.waiting,
            woken=partition.woken,
            events=partition.events,
            expiry=tenant.expiry,
            root=root,
            tid=tid,
            worker=worker,
            token=token,
            lease_ms=lease_ms,
            limit=limit,
            inspect_limit=self.options.inspect_limit if inspect_limit is None else inspect_limit,
            wait_ms=wait_ms,
            seed=seed(),
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms or self.options.dead_retention_ms,
            clock=self._now(),
            limits=limits.line(root, tid),
            keys=keys.in_claim_order(root, tid, tuple(commands)),
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
            lambda reply: Lease(task_id=task_id, until_ms=replies.accepted(reply)[1]),
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
            blob = replies.encode_answer(answer)
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
            **self._giving_back(tid),
            id=task_id,
            worker=worker,
            token=token,
            delay_ms="" if delay_ms is None else delay_ms,
            reason=reason,
            seed=seed(),
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms,
        )

    def abandon(self, tid: str, task_id: str, worker: str, *, token: str, dead_retention_ms: int) -> Call[Returned]:
        return self._call(
            "abandon",
            returned,
            **self._giving_back(tid),
            id=task_id,
            worker=worker,
            token=token,
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms,
        )


def returned(reply: Sequence[Any]) -> Returned:
    status, delay_ms = replies.accepted(reply)
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
