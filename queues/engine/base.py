"""What every verb stands on: the runner, the clock, and the keys of whoever is asked about."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from core.redis.partitions import partition_of
from core.redis.script_call import Command, Runner, ScriptCall
from queues.engine import keys, script_loader
from queues.engine.options import Options

R = TypeVar("R")
NOTHING: Mapping[str, int] = {}


class Engine:
    """`clock` replaces Redis' own time, in tests only."""

    def __init__(self, runner: Runner, options: Options | None = None, clock: Callable[[], int] | None = None) -> None:
        self.runner = runner
        self.options = options or Options()
        self.clock = clock

    def partition_of(self, tid: str) -> int:
        return partition_of(tid, self.options.partitions)

    def call(self, verb: str, read: Callable[[Any], R], **named: Any) -> ScriptCall[R]:
        script = script_loader.load(verb)
        command: Command = (script, script.bind(**named))
        return ScriptCall(self.runner, [command], lambda answers: read(answers[0]))

    def partition_keys(self, tid: str) -> keys.PartitionKeys:
        return keys.of_partition(partition_of(tid, self.options.partitions))

    def tenant_keys(self, tid: str) -> keys.TenantKeys:
        return keys.of_tenant(self.root(tid), tid)

    def root(self, tid: str) -> str:
        return self.partition_keys(tid).root

    def now(self) -> int | str:
        return self.clock() if self.clock else ""

    def release_keys(self, tid: str) -> dict[str, Any]:
        partition = self.partition_keys(tid)
        return {
            "due": partition.due,
            "waiting": partition.waiting,
            "woken": partition.woken,
            "events": partition.events,
            "expiry": self.tenant_keys(tid).expiry,
            "root": partition.root,
            "tid": tid,
            "clock": self.now(),
        }


def retention_line(retention_ms: int, retentions_ms: Mapping[str, int]) -> str | int:
    """How long what has ended stays, as `lua/lib/retention.lua` reads it."""
    if not retentions_ms:
        return retention_ms
    return "".join([f"{retention_ms}", *(f" {command}={each}" for command, each in retentions_ms.items())])


def seed() -> int:
    return random.getrandbits(31)
