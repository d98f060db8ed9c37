"""Every key of the hot path, built here and nowhere else.

All keys of a tenant carry one hash tag, its partition, so every script runs in one slot of a Redis Cluster. Only
`tid` (minted by us) and a validated command reach a key; user text never does, except as a digest.

    codeq:{p}:q:<tid>:<command>:ready:<0..9>   LIST    ids; pushed left, taken right: FIFO inside a priority
    codeq:{p}:q:<tid>:<command>:delayed        ZSET    id -> moment it becomes visible (ms)
    codeq:{p}:q:<tid>:<command>:inprog         ZSET    id -> lease deadline (ms)
    codeq:{p}:q:<tid>:<command>:dlq            ZSET    id -> dead since (ms)
    codeq:{p}:queues:<tid>                     HASH    command -> active | paused, " <most in progress>": its queues
    codeq:{p}:policies:<tid>                   HASH    command -> "<backoff> <base ms> <cap ms> <dead letter queue>"
    codeq:{p}:ghosts:<tid>                     HASH    <command>:<priority> -> ids in line whose task has ended
    codeq:{p}:expiry:<tid>                     ZSET    ended id -> when cleanup may take it
    codeq:{p}:task:<id>                        HASH    spec (immutable blob), what changes, the worker's answer
    codeq:{p}:idem:<tid>:<sha256 of the key>   STRING  task id; lives as long as the retention
    codeq:{p}:rate:<tid>:<what>[:<token>]      STRING  moment (ms) until which what was admitted is paid for
    codeq:{p}:ranked:<tid>:<name>              ZSET    id -> its place in line, or until when it is delayed or held
    codeq:{p}:ranked:<tid>:<name>:lock:<id>    STRING  "<host>:<uuid>" of who is at work on it
    codeq:{p}:tenants                          SET     every <tid> that has a queue
    codeq:{p}:due                              ZSET    <tid>:<command> -> no later than when it needs a visit
    codeq:{p}:waiting                          ZSET    <tid>:<command> -> until when a long poll waits for it
    codeq:{p}:woken                            SET     <tid>:<command> that turned non-empty: for worker notifications
    codeq:{p}:events                           STREAM  one entry per ended attempt and per terminal transition
    codeq:{p}:wake                             CHANNEL "ready <queue>"; "queue <queue>", if it is new; "ended <id>"
    codeq:{p}:lock:<job>                       STRING  whose turn it is to run one of beat's jobs, in one partition
    codeq:{p}:absent                           -       never exists: for `whole` in core/redis/runners.py
    codeq:partitions                           STRING  how many there are, fixed at first start
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from core.redis.partitions import partition_root

PRIORITIES = range(10)
COMMAND = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
LEGEND = re.compile(
    r"codeq:(partitions|\{\d+\}:("
    r"q:[a-z0-9]+:[A-Za-z0-9_.-]{1,128}:(ready:\d|delayed|inprog|dlq)"
    r"|(queues|policies|ghosts|expiry):[a-z0-9]+|task:[0-9a-f-]{36}|idem:[a-z0-9]+:[0-9a-f]{64}"
    r"|rate:[a-z0-9]+:[a-z]+(:[0-9a-f]+)?"
    r"|ranked:[a-z0-9]+:[A-Za-z0-9_.-]{1,128}(:lock:[A-Za-z0-9_.-]{1,128})?"
    r"|tenants|due|waiting|woken|events|lock:[a-z.]+))"
)


class PartitionKeys(NamedTuple):
    root: str
    tenants: str
    due: str
    waiting: str
    woken: str
    events: str
    wake: str


class TenantKeys(NamedTuple):
    queues: str
    policies: str
    ghosts: str
    expiry: str


class QueueKeys(NamedTuple):
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
def in_claim_order(root: str, tid: str, commands: tuple[str, ...]) -> tuple[str, ...]:
    """The ready lists of these queues, the best priority of all of them first. A worker asks for the same all day."""
    lines = [of_queue(root, tid, command).ready for command in commands]
    return tuple([line[priority] for priority in reversed(PRIORITIES) for line in lines])


def rate(root: str, tid: str, what: str, token: str = "") -> str:
    """The bucket of a tenant for one kind of request, or that of one of its tokens (by its fingerprint)."""
    return f"{root}rate:{tid}:{what}:{token}" if token else f"{root}rate:{tid}:{what}"


def ranked(root: str, tid: str, name: str) -> str:
    return f"{root}ranked:{tid}:{name}"


def task(root: str, task_id: str) -> str:
    return f"{root}task:{task_id}"


# The same builders for scripts that learn a task's queue only from the task (`--@ include keys`). `root` is an
# argument of those scripts, so everything they build stays in the slot of the keys they declare.
LUA = """\
local function task_key(id) return root .. 'task:' .. id end
local function idem_key(tid, digest) return root .. 'idem:' .. tid .. ':' .. digest end
local function queue_key(queue, part) return root .. 'q:' .. queue .. ':' .. part end
local function ready_key(queue, priority) return root .. 'q:' .. queue .. ':ready:' .. priority end
local function tenant_key(queue, part) return root .. part .. ':' .. string.match(queue, '^[^:]+') end
local function command_of(queue) return string.match(queue, ':(.*)$') end
"""
