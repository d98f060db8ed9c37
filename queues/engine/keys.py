"""Keys in Redis. Only this module builds the keys of queues, tasks and tenants.

All keys of a tenant carry one hash tag, its partition, so every script runs in one slot of a Redis Cluster. Keys
contain only `tid`, which codeQ generates, and validated commands and names. Other text from users appears as a digest.
In the code, `root` is the prefix of a partition's keys, `codeq:{p}:`.

    codeq:{p}:q:<tid>:<command>:ready:<0..9>   LIST    ids; pushed left, popped right: FIFO within a priority
    codeq:{p}:q:<tid>:<command>:delayed        ZSET    id -> when it becomes visible (ms)
    codeq:{p}:q:<tid>:<command>:inprog         ZSET    id -> lease deadline (ms)
    codeq:{p}:q:<tid>:<command>:dlq            ZSET    id -> dead since (ms)
    codeq:{p}:queues:<tid>                     HASH    command -> active | paused, " <limit of tasks in progress>"
    codeq:{p}:policies:<tid>                   HASH    command -> "<backoff> <base ms> <cap ms> <dead letter queue>"
    codeq:{p}:ghosts:<tid>                     HASH    <command>:<priority> -> number of ready ids whose task has ended
    codeq:{p}:expiry:<tid>                     ZSET    id of an ended task -> when its retention expires (ms)
    codeq:{p}:task:<id>                        HASH    spec (blob; a replay may replace it), state, the worker's answer
    codeq:{p}:idem:<tid>:<sha256 of the key>   STRING  task id; expires with the retention
    codeq:{p}:rate:<tid>:<kind>[:<token>]      STRING  GCRA: theoretical arrival time of the next request (ms)
    codeq:{p}:ranked:<tid>:<name>              ZSET    id -> its rank and arrival, or when its delay or lock ends
    codeq:{p}:ranked:<tid>:<name>:lock:<id>    STRING  "<host>:<uuid>" of the lock's holder
    codeq:{p}:tenants                          SET     every <tid> that has a queue
    codeq:{p}:due                              ZSET    <tid>:<command> -> lower bound of when its next task is due (ms)
    codeq:{p}:waiting                          ZSET    <tid>:<command> -> until when a long poll waits (ms)
    codeq:{p}:woken                            SET     <tid>:<command> with ready tasks again, for worker notifications
    codeq:{p}:events                           STREAM  an entry per ended attempt, ended task or dead letter change
    codeq:{p}:wake                             CHANNEL "ready <queue>", "queue <queue>" for a new one, "ended <id>"
    codeq:{p}:lock:<task>                      STRING  lock of a periodic task in one partition
    codeq:{p}:absent                           -       never exists; see `with_slot_guard` in core/redis/runners.py
    codeq:partitions                           STRING  number of partitions, fixed at the first start
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from core.redis.partitions import partition_root

PRIORITIES = range(10)
COMMAND = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
KEY_PATTERN = re.compile(
    r"codeq:(partitions|\{\d+\}:("
    r"q:[a-z0-9]+:[A-Za-z0-9_.-]{1,128}:(ready:\d|delayed|inprog|dlq)"
    r"|(queues|policies|ghosts|expiry):[a-z0-9]+|task:[0-9a-f-]{36}|idem:[a-z0-9]+:[0-9a-f]{64}"
    r"|rate:[a-z0-9]+:[a-z]+(:[0-9a-f]+)?"
    r"|ranked:[a-z0-9]+:[A-Za-z0-9_.-]{1,128}(:lock:[A-Za-z0-9_.-]{1,128})?"
    r"|tenants|due|waiting|woken|events|lock:[a-z.]+))"
)


class PartitionKeys(NamedTuple):
    """The keys that all tenants of a partition share. `root` is their prefix."""

    root: str
    tenants: str
    due: str
    waiting: str
    woken: str
    events: str
    wake: str


class TenantKeys(NamedTuple):
    """The keys that all queues of a tenant share."""

    queues: str
    policies: str
    ghosts: str
    expiry: str


class QueueKeys(NamedTuple):
    """The keys of one queue. `name` is "<tid>:<command>"."""

    name: str
    ready: tuple[str, ...]  # by priority, 0 first
    delayed: str
    inprog: str
    dlq: str


@lru_cache(maxsize=4096)
def of_partition(partition: int) -> PartitionKeys:
    root = partition_root(partition)
    return PartitionKeys(root, *(root + part for part in PartitionKeys._fields[1:]))


@lru_cache(maxsize=100_000)
def of_tenant(root: str, tid: str) -> TenantKeys:
    return TenantKeys(*(f"{root}{part}:{tid}" for part in TenantKeys._fields))


@lru_cache(maxsize=100_000)
def of_queue(root: str, tid: str, command: str) -> QueueKeys:
    name = f"{tid}:{command}"
    base = f"{root}q:{name}:"
    ready = tuple(f"{base}ready:{priority}" for priority in PRIORITIES)
    return QueueKeys(name, ready, base + "delayed", base + "inprog", base + "dlq")


@lru_cache(maxsize=1_000)
def ready_lists_in_claim_order(root: str, tid: str, commands: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of the ready lists of these queues, highest priority first.

    The result is cached, because a worker claims from the same queues again and again.
    """
    ready_lists = [of_queue(root, tid, command).ready for command in commands]
    return tuple([ready[priority] for priority in reversed(PRIORITIES) for ready in ready_lists])


def rate_limit(root: str, tid: str, kind: str, token: str = "") -> str:
    """Return the key of the rate limit of a tenant or a token. `token` is its fingerprint."""
    return f"{root}rate:{tid}:{kind}:{token}" if token else f"{root}rate:{tid}:{kind}"


def ranked(root: str, tid: str, name: str) -> str:
    return f"{root}ranked:{tid}:{name}"


def task(root: str, task_id: str) -> str:
    return f"{root}task:{task_id}"


# The same builders in Lua (`--@ include keys`), for scripts that read a task's queue from the task. `root` is an
# argument of these scripts, so every key that they build is in the slot of the keys that they declare.
LUA_LIBRARY = """\
local function task_key(id) return root .. 'task:' .. id end
local function idem_key(tid, digest) return root .. 'idem:' .. tid .. ':' .. digest end
local function queue_key(queue, part) return root .. 'q:' .. queue .. ':' .. part end
local function ready_key(queue, priority) return root .. 'q:' .. queue .. ':ready:' .. priority end
local function tenant_key(queue, part) return root .. part .. ':' .. string.match(queue, '^[^:]+') end
local function command_of(queue) return string.match(queue, ':(.*)$') end
"""
