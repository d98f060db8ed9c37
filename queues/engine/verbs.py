"""What every verb stands on: the runner, the clock, and the keys of whoever is asked about."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from queues.engine import keys, scripts
from queues.engine.call import Call, Command, Runner
from queues.engine.options import Options

R = TypeVar("R")
NOTHING: Mapping[str, int] = {}


class Verbs:
    """`clock` replaces Redis' own time, in tests only."""

    def __init__(self, runner: Runner, options: Options | None = None, clock: Callable[[], int] | None = None) -> None:
        self.runner = runner
        self.options = options or Options()
        self._clock = clock

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

    def _giving_back(self, tid: str) -> dict[str, Any]:
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


def retention_line(retention_ms: int, retentions_ms: Mapping[str, int]) -> str | int:
    """How long what has ended stays, as `lua/lib/retention.lua` reads it."""
    if not retentions_ms:
        return retention_ms
    return "".join([f"{retention_ms}", *(f" {command}={each}" for command, each in retentions_ms.items())])


def seed() -> int:
    return random.getrandbits(31)
