"""The engine: its runner, its options, and the keys of partitions and tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from core.redis.partitions import partition_of
from core.redis.script_call import Runner, ScriptCall, ScriptCommand
from queues.engine import keys, script_loader
from queues.engine.options import Options

R = TypeVar("R")


class Engine:
    """The runner, the options and the clock of all commands and queries.

    The runner sends scripts to Redis. The commands and queries of this package are functions with an engine as their
    first argument. They return a `ScriptCall`, which is sent when it is awaited or `run_sync()` is called. `clock`
    returns Unix milliseconds and replaces the time of Redis; only tests set it.
    """

    def __init__(self, runner: Runner, options: Options | None = None, clock: Callable[[], int] | None = None) -> None:
        self.runner = runner
        self.options = options or Options()
        self.clock = clock

    def prepare(self, script_name: str, decode: Callable[[Any], R], **arguments: Any) -> ScriptCall[R]:
        """Return the call of a script; `decode` converts its reply.

        `arguments` are the values for the names in the script's header; `keys` and `args` are for its repeated groups.
        """
        script = script_loader.load(script_name)
        command: ScriptCommand = (script, script.bind(**arguments))
        return ScriptCall(self.runner, [command], lambda replies: decode(replies[0]))

    def partition_of(self, tid: str) -> int:
        return partition_of(tid, self.options.partitions)

    def partition_keys(self, tid: str) -> keys.PartitionKeys:
        return keys.of_partition(partition_of(tid, self.options.partitions))

    def tenant_keys(self, tid: str) -> keys.TenantKeys:
        return keys.of_tenant(self.root(tid), tid)

    def root(self, tid: str) -> str:
        """Return the prefix of all keys in the tenant's partition."""
        return self.partition_keys(tid).root

    def clock_argument(self) -> int | str:
        """Return the script argument `clock`: '' for Redis' own time."""
        return self.clock() if self.clock else ""
