"""The settings as one frozen, typed and validated object, such as `conf().queues.batch`.

`codeq_site/env.py` reads the environment into `settings.CODEQ`, and this module validates it.
`CODEQ_<SECTION>_<FIELD>` sets `conf().<section>.<field>`. `docs/reference/settings.md` is generated from the
descriptions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.errors import ConfigError

# The settings that this release renames: former path -> path. A former name works for one release, with a warning.
FORMER_NAMES = {
    "queues.horizon_seconds": "queues.max_schedule_ahead_seconds",
    "queues.inspect_limit": "queues.repair_limit",
    "webhooks.burst": "webhooks.max_unrecorded",
    "webhooks.tail_seconds": "webhooks.retry_tail_delays_seconds",
    "webhooks.tries": "webhooks.quick_attempts",
}
# The validator classes that this release moves: former path -> path. `auth.validators` may name either.
FORMER_VALIDATORS = {
    "tenants.tokens.JwksValidator": "tenants.auth.validators.JwksValidator",
    "tenants.tokens.TenantKeyValidator": "tenants.auth.validators.TenantKeyValidator",
}

BackoffPolicy = Literal["fixed", "linear", "exponential", "exp_full_jitter", "exp_equal_jitter"]
Count = Annotated[int, Meta(ge=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the settings."""


class Web(Section, frozen=True):
    host: Annotated[
        str,
        Meta(
            description="Address on which the web processes listen. Set `0.0.0.0` in a container. The proxy terminates "
            "TLS."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the API, its documentation and the console.")] = 8080
    workers: Annotated[
        int,
        Meta(
            ge=0,
            description="Number of web processes that `manage.py up` starts; 0 starts one per core. More processes "
            "serve more requests until Valkey's one core is busy.",
        ),
    ] = 0
    serve: Annotated[
        Literal["api", "console", "all"],
        Meta(
            description="Parts that a web process serves: the API, the console, or both on one port. Separate them to "
            "keep the console's load away from the API."
        ),
    ] = "all"
    body_bytes: Annotated[
        Count,
        Meta(
            description="Largest request body, in bytes; a larger one gets a 413. A higher limit allows larger batches "
            "and uses more memory per request. The proxy must allow the same size."
        ),
    ] = 8 * 2**20
    redis_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds to wait for Redis before a request fails with a 503. A lower value fails sooner "
            "during an outage; a higher one tolerates slower disks.",
        ),
    ] = 5.0
    max_waiters: Annotated[
        Count,
        Meta(
            description="Largest number of long polls that one web process holds open. Further ones check once and "
            "return immediately, so their clients poll instead of waiting. 2,000 idle long polls take about 36 MB."
        ),
    ] = 20_000
    metrics: Annotated[
        Literal["auto", "open", "operator"],
        Meta(
            description="Access to /metrics: `open` = every client that reaches the port; `operator` = holders of an "
            "operator's token; `auto` = `operator` in production, else `open`."
        ),
    ] = "auto"


class Queues(Section, frozen=True):
    partitions: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="Number of partitions of the key space; each is one slot of a Redis Cluster. The first "
            "process that starts on an empty Redis stores it, and processes with another number refuse to start. On a "
            "cluster choose about 20 per primary of its largest planned size; each costs a few commands a second.",
        ),
    ] = 16
    payload_bytes: Annotated[
        Count,
        Meta(
            description="Largest payload of a task, in bytes of compact JSON; a larger one gets a 413. Payloads are "
            "held in Redis' memory. A tenant can have its own limit."
        ),
    ] = 256 * 2**10
    result_bytes: Annotated[
        Count,
        Meta(
            description="Largest result, in bytes of compact JSON; a larger one gets a 413. Results are held in Redis' "
            "memory until their retention ends. A tenant can have its own limit."
        ),
    ] = 256 * 2**10
    artifact_bytes: Annotated[
        Count,
        Meta(
            description="Largest artifact sent inside a result, in bytes after base64 decoding; a larger one gets a "
            "413. Raise `CODEQ_WEB_BODY_BYTES` with it."
        ),
    ] = 5 * 2**20
    max_attempts: Annotated[
        Count,
        Meta(
            description="Attempts before a task becomes a dead letter, where neither the task nor its queue's policy "
            "sets a number."
        ),
    ] = 5
    max_attempts_limit: Annotated[Count, Meta(description="Largest `maxAttempts` that a task or a policy may set.")] = (
        1000
    )
    lease_seconds: Annotated[
        Count,
        Meta(
            description="Length of a lease, in seconds, where the claim sets none. A shorter lease returns the tasks "
            "of a dead worker sooner; a longer one needs fewer heartbeats."
        ),
    ] = 300
    lease_limit_seconds: Annotated[Count, Meta(description="Longest lease that a claim may request, in seconds.")] = (
        43_200
    )
    batch: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Largest number of tasks or results in one batch request, and of tasks that an exchange may "
            "take. A larger batch costs less per item and occupies Redis for longer at a time.",
        ),
    ] = 100
    claim_batch: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Largest number of tasks that one claim may take, except in an exchange. A higher limit saves "
            "requests and lets one worker take more tasks away from the others.",
        ),
    ] = 10
    repair_limit: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Before it takes tasks, a claim makes at most this many due tasks ready, and ends at most "
            "this many expired leases. A higher value clears a backlog sooner; a lower one keeps claims short.",
        ),
    ] = 200
    max_schedule_ahead_seconds: Annotated[
        Count,
        Meta(
            description="How far in the future a task may be scheduled, in seconds; a later time gets a 400. It also "
            "bounds `delaySeconds`, `backoffBaseSeconds` and `backoffCapSeconds`."
        ),
    ] = 366 * 86_400
    retention_seconds: Annotated[
        Count,
        Meta(
            description="Seconds for which an ended task stays in Redis with its result and its idempotency key. A "
            "longer retention uses more memory; the audit in PostgreSQL keeps the task in any case. A tenant or a "
            "queue can have its own."
        ),
    ] = 86_400
    dead_retention_seconds: Annotated[
        Count,
        Meta(
            description="Seconds for which a dead letter stays in Redis and can be replayed. A longer retention gives "
            "operators more time and uses more memory. A tenant can have its own."
        ),
    ] = 7 * 86_400
    backoff: Annotated[
        BackoffPolicy,
        Meta(
            description="How the delay before a retry grows, where a queue's policy does not choose. The two with "
            "jitter spread retries over time, so that tasks that failed together do not return together."
        ),
    ] = "exp_full_jitter"
    backoff_base_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Delay before the first retry, in seconds (with full jitter: the longest). The later delays "
            "grow from it.",
        ),
    ] = 5.0
    backoff_cap_seconds: Annotated[
        float,
        Meta(gt=0, description="Longest delay before a retry, in seconds. It also caps `delaySeconds` of a nack."),
    ] = 900.0
    bloom: Annotated[
        bool,
        Meta(
            description="Use the three in-process Bloom filters, which save requests to Redis for repeated keys and "
            "deleted tasks. Answers are the same without them; turn them off to save memory."
        ),
    ] = True
    events_alarm: Annotated[
        Count,
        Meta(
            description="Entries in one partition's events stream above which the drain logs an error. An entry that "
            "waits for PostgreSQL takes about 300 bytes; a lower value warns sooner."
        ),
    ] = 1_000_000
    durability: Annotated[
        Literal["fsync", "relaxed"],
        Meta(
            description="`fsync` makes /readyz fail unless Redis writes to disk before it acknowledges. `relaxed` "
            "accepts any Redis: a crash of its machine then loses acknowledged tasks. Production refuses `relaxed`."
        ),
    ] = "fsync"


class Auth(Section, frozen=True):
    validators: Annotated[
        list[str],
        Meta(
            description="Dotted paths of the token validator classes, comma-separated. They are tried in order until "
            "one recognizes the token."
        ),
    ] = msgspec.field(
        default_factory=lambda: ["tenants.auth.validators.JwksValidator", "tenants.auth.validators.TenantKeyValidator"]
    )
    issuer: Annotated[
        str, Meta(description="Value of the `iss` claim in the tokens whose keys are at `CODEQ_AUTH_JWKS_URL`.")
    ] = "codeq"
    jwks_url: Annotated[
        str,
        Meta(
            description="URL of the issuer's public keys (JWKS); https in production. Empty: this installation signs "
            "tokens with its own key, and `manage.py token` prints them."
        ),
    ] = ""
    producer_audience: Annotated[str, Meta(description="Value of the `aud` claim in producers' tokens.")] = (
        "codeq-producer"
    )
    worker_audience: Annotated[str, Meta(description="Value of the `aud` claim in workers' tokens.")] = "codeq-worker"
    leeway_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=300,
            description="Clock difference, in seconds, tolerated in `exp` and `nbf`. A token is accepted for this long "
            "after it expires.",
        ),
    ] = 60
    cache_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=60,
            description="Seconds for which a verified token is not verified again. A higher value saves processor "
            "time, but tokens of a retired key stay valid that much longer. A suspended tenant is refused within "
            "seconds in any case.",
        ),
    ] = 60
    single_tenant: Annotated[
        bool,
        Meta(description="Use `sub` as the tenant of a token without a tenant claim. Off: such a token is refused."),
    ] = False
    provision_tenants: Annotated[
        bool,
        Meta(description="Create the tenant that a valid token names, if it does not exist. Refused in production."),
    ] = False
    producer_as_worker: Annotated[
        bool, Meta(description="Let producers' tokens claim tasks, for development. Refused in production.")
    ] = False


class TenantLimits(Section, frozen=True):
    """Limits of tenants. A limit in a tenant's row takes precedence. A rate of 0 is no limit."""

    depth: Annotated[
        int,
        Meta(
            ge=0,
            description="Tasks that may wait in all queues of a tenant together; further ones get a 429 `queue_full`. "
            "0 = no limit but Redis' memory.",
        ),
    ] = 0
    create_per_second: Annotated[
        float, Meta(ge=0, description="Tasks that a tenant may create per second; more get a 429. 0 = no limit.")
    ] = 0
    claim_per_second: Annotated[
        float,
        Meta(
            ge=0,
            description="Claims that a tenant may make per second; more get a 429. A long poll counts once. 0 = no "
            "limit.",
        ),
    ] = 0
    admin_per_second: Annotated[
        float,
        Meta(ge=0, description="Calls of `/admin/…` that a tenant may make per second; more get a 429. 0 = no limit."),
    ] = 0
    webhook_per_second: Annotated[
        float,
        Meta(
            ge=0,
            description="Callbacks sent for a tenant per second; further ones are sent later, not dropped. 0 = no "
            "limit.",
        ),
    ] = 0
    burst_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Size of a rate limit's burst, in seconds of its rate: a tenant that was idle may use this "
            "much at once. A higher value tolerates bursts; a lower one enforces an even rate.",
        ),
    ] = 2.0
    token_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Percentage of its tenant's rate that a single token may use. Below 100 one client cannot use "
            "the whole rate of its tenant.",
        ),
    ] = 100
    idempotency_strict: Annotated[
        bool,
        Meta(
            description="Answer 409 when an idempotency key is used again with a different request. Off: the first "
            "task is returned."
        ),
    ] = False
    lease_token_required: Annotated[
        bool,
        Meta(
            description="Require the lease token with each heartbeat, result, nack and abandon. Off: the token is "
            "checked only if it is sent."
        ),
    ] = False


class Webhooks(Section, frozen=True):
    allow_hosts: Annotated[
        list[str],
        Meta(
            description="Networks (CIDR, comma-separated) that callbacks may reach although they are not public. Every "
            "tenant can then send requests into them."
        ),
    ] = msgspec.field(default_factory=list)
    deadline_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time for one attempt of a delivery, in seconds, from the DNS lookup to the end of the "
            "response. A higher value lets a hanging endpoint occupy its slots for longer.",
        ),
    ] = 10.0
    answer_bytes: Annotated[
        Count,
        Meta(description="Largest number of bytes read from an endpoint's response. The first 2 KiB are stored."),
    ] = 64 * 2**10
    quick_attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=20,
            description="Attempts of a delivery in quick succession, before the long pauses of "
            "`CODEQ_WEBHOOKS_RETRY_TAIL_DELAYS_SECONDS`. More attempts hide short outages of an endpoint and repeat "
            "more requests to a broken one.",
        ),
    ] = 5
    retry_base_seconds: Annotated[
        float,
        Meta(gt=0, description="Pause after the first attempt, in seconds; it doubles after each further quick one."),
    ] = 2.0
    retry_cap_seconds: Annotated[float, Meta(gt=0, description="Longest pause between quick attempts, in seconds.")] = (
        60.0
    )
    retry_tail_delays_seconds: Annotated[
        list[float],
        Meta(
            description="Pauses after the quick attempts, in seconds, comma-separated: one attempt after each, then "
            "the delivery is given up. The default lasts a little more than a day. Empty: no attempt after the quick "
            "ones."
        ),
    ] = msgspec.field(default_factory=lambda: [300.0, 900.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 32_400.0])
    slots: Annotated[
        int,
        Meta(
            ge=1,
            le=2000,
            description="Callbacks that one worker process sends at once. More slots send faster to slow endpoints and "
            "use more sockets.",
        ),
    ] = 128
    slots_per_host: Annotated[
        int,
        Meta(
            ge=1,
            le=2000,
            description="Callbacks sent at once to one host for one tenant, and therefore the number of slots that a "
            "hanging host can occupy. A higher value sends faster to a single host.",
        ),
    ] = 12
    max_unrecorded: Annotated[
        int,
        Meta(
            ge=1,
            le=2000,
            description="Largest number of callbacks that have started within the last 20 ms and are not recorded in "
            "the database yet; at this number no further one starts. About this many are sent twice if a worker is "
            "killed. A higher value sends faster to quick endpoints and repeats more after a crash.",
        ),
    ] = 10
    failures_to_pause: Annotated[
        Count,
        Meta(
            description="Failures in a row after which a tenant's deliveries to a host are paused, except for probes. "
            "A lower value spares a failing host sooner."
        ),
    ] = 20
    probe_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between probes of a paused host. A lower value notices its recovery sooner.",
        ),
    ] = 30.0
    disable_after_seconds: Annotated[
        Count,
        Meta(
            description="Seconds of continuous failure after which an endpoint is disabled. Its deliveries are then "
            "held until an operator enables it again."
        ),
    ] = 5 * 86_400
    retention_seconds: Annotated[
        Count,
        Meta(
            description="Seconds for which finished deliveries and their attempts are kept in PostgreSQL. A longer "
            "retention uses more disk."
        ),
    ] = 30 * 86_400
    subscriptions: Annotated[
        Count, Meta(description="Largest number of active subscriptions per tenant; a further one gets a 403.")
    ] = 1000


class Pipeline(Section, frozen=True):
    lake: Annotated[
        str,
        Meta(
            description="URL of the lake: `file://…` or `s3a://bucket/prefix`. Several machines need one that all of "
            "them reach. Empty: a directory under `CODEQ_HOME`."
        ),
    ] = ""


class Tracing(Section, frozen=True):
    endpoint: Annotated[
        str,
        Meta(
            description="URL to which spans are sent, OTLP over HTTP: `http://collector:4318/v1/traces`. Needs "
            "`codeq-server[tracing]`. Empty: no spans."
        ),
    ] = ""
    ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Fraction of the traces begun by codeQ that is recorded, 0 to 1. A trace begun by a caller "
            "follows the caller's decision.",
        ),
    ] = 1.0


class Conf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    home: Annotated[
        str,
        Meta(
            description="Directory of local state: the embedded servers' data, keys, metrics, and by default artifacts "
            "and the lake. Every process needs one that it may write to."
        ),
    ] = "var"
    production: Annotated[
        bool,
        Meta(
            description="Production mode: https and secure cookies, a token for /metrics, and no embedded servers. "
            "`manage.py up` then refuses insecure settings; for processes of your own run `manage.py check --deploy`."
        ),
    ] = False
    redis_url: Annotated[
        str,
        Meta(
            description="URL of the Valkey or Redis (7.2 or newer) that holds the queues. Empty: the one that "
            "`manage.py up` starts."
        ),
    ] = ""
    redis_cluster: Annotated[
        bool,
        Meta(
            description="`REDIS_URL` names one or more nodes of a Redis Cluster: `redis://a:6379,b:6379`. The other "
            "nodes are discovered. A process refuses to start if this is on and the server is not a node of a "
            "cluster, or if this is off and the server is one (docs/howto/production.md)."
        ),
    ] = False
    redis_allocator: Annotated[
        str,
        Meta(
            description="Memory allocator that is preloaded into Redis, such as `jemalloc`. Redis reports the one that "
            "it was built with, and a warning appears if that is libc's. Empty: what Redis reports."
        ),
    ] = ""
    database_url: Annotated[
        str,
        Meta(description="URL of PostgreSQL (14 or newer). Empty: the one that `manage.py up` starts."),
    ] = ""
    broker_url: Annotated[
        str,
        Meta(
            description="URL of Celery's broker; not a cluster node. If it loses its data, no task is lost. Empty: "
            "the one that `manage.py up` starts."
        ),
    ] = ""
    artifacts: Annotated[
        str,
        Meta(
            description="Where artifacts are stored: `file:///a/directory`, or `s3://bucket/prefix?endpoint_url=…` "
            "with `codeq-server[s3]` installed (docs/howto/artifacts.md). Empty: a directory under `CODEQ_HOME`."
        ),
    ] = ""
    spark_master: Annotated[
        str, Meta(description="Spark master that runs the pipeline: `local[*]`, or `spark://host:7077`.")
    ] = "local[*]"
    secret_key: Annotated[
        str,
        Meta(
            description="Key that signs sessions and encrypts the secrets stored in the database; at least 50 random "
            "characters in production. Without it stored secrets cannot be read, so back it up."
        ),
    ] = ""
    secret_key_fallbacks: Annotated[
        list[str],
        Meta(
            description="Former values of `SECRET_KEY`, comma-separated. Sessions and secrets made with them stay "
            "valid. Remove a value after `manage.py reseal`, when its sessions have expired."
        ),
    ] = msgspec.field(default_factory=list)
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="Host names, comma-separated, under which the console is served; other names get a 400. "
            "Production refuses `*`."
        ),
    ] = msgspec.field(default_factory=lambda: ["localhost", "127.0.0.1", "[::1]"])
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Format of log lines: `text` to read, `json` to collect.")
    ] = "text"
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        Meta(
            description="Minimum log level. `DEBUG` also logs what libraries send and receive; do not use it in "
            "production."
        ),
    ] = "INFO"
    web: Web = Web()
    queues: Queues = Queues()
    auth: Auth = Auth()
    limits: TenantLimits = TenantLimits()
    webhooks: Webhooks = Webhooks()
    pipeline: Pipeline = Pipeline()
    tracing: Tracing = Tracing()

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser().absolute()


def variable(path: str) -> str:
    """Return the environment variable of a setting, such as `CODEQ_WEB_PORT` for `web.port`."""
    return f"CODEQ_{path}".replace(".", "_").upper()


def replace_former_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values under their present names, and a warning for each former name.

    Raises ConfigError if a setting is set under both of its names.
    """
    current = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    warnings = []
    for former, path in FORMER_NAMES.items():
        section, _, former_field = former.rpartition(".")
        field = path.rpartition(".")[2]
        fields = current.get(section)
        if not isinstance(fields, dict) or former_field not in fields:
            continue
        if field in fields:
            raise ConfigError(
                f"{variable(former)} and {variable(path)} are the same setting: unset {variable(former)}, "
                "which is the former name."
            )
        fields[field] = fields.pop(former_field)
        warnings.append(
            f"{variable(former)} is now {variable(path)}. The former name will not work in the next release."
        )
    auth = current.get("auth")
    if isinstance(auth, dict) and isinstance(paths := auth.get("validators"), list):
        auth["validators"] = [FORMER_VALIDATORS.get(path, path) for path in paths]
        warnings += [
            f"CODEQ_AUTH_VALIDATORS: {path} is now {FORMER_VALIDATORS[path]}. "
            "The former path will not work in the next release."
            for path in paths
            if path in FORMER_VALIDATORS
        ]
    return current, warnings


def build(values: Mapping[str, Any]) -> Conf:
    """Convert plain values, such as environment variables, to a `Conf`. Raises ConfigError."""
    current, _ = replace_former_names(values)
    try:
        return msgspec.convert(current, type=Conf, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"codeQ's settings: {error}") from error


@cache
def conf() -> Conf:
    from django.conf import settings

    return build(settings.CODEQ)
