"""What holds in a queue: whether claims get anything from it, how, and how often somebody may ask."""

from __future__ import annotations

from codeq_site import errors
from queues.engine import keys
from queues.engine.call import Call
from queues.engine.options import Limits
from queues.engine.verbs import Verbs


class Governing(Verbs):
    """Pause, resume, policy and admission."""

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

    def admit(self, tid: str, limits: Limits) -> Call[None]:
        """Count one request of a kind that no other script counts. TooMany when the limit is reached."""

        def read(wait_ms: int) -> None:
            if wait_ms:
                raise errors.TooMany(retry_after_seconds=wait_ms / 1000)

        root = self._root(tid)
        return self._call("admit", read, due=self._partition(tid).due, limits=limits.line(root, tid), clock=self._now())
