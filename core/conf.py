"""codeQ's settings as one frozen, typed, validated object: `conf().queues.lease_seconds`.

Environment -> `env.py` -> `settings.CODEQ` -> here. `CODEQ_<SECTION>_<FIELD>` sets `conf().<section>.<field>`.
The descriptions below are the reference page (`docs/reference/settings.md` is generated from them).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from core.errors import ConfigError

BackoffPolicy = Literal["fixed", "linear", "exponential", "exp_full_jitter", "exp_equal_jitter"]
Count = Annotated[int, Meta(ge=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Web(Section, frozen=True):
    host: Annotated[str, Meta(description="Address the web processes listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of API, docs and console.")] = 8080
    workers: Annotated[int, Meta(ge=0, description="Web processes; 0 = one per core.")] = 0
    serve: Annotated[
        Literal["api", "console", "all"],
        Meta(description="What a web process answers: the API, the console, or both on one port."),
    ] = "all"
    body_bytes: Annotated[Count, Meta(description="Largest request body, in bytes; more is a 413.")] = 8 * 2**20
    redis_timeout_seconds: Annotated[
        float, Meta(gt=0, description="A request that Redis has not answered by then is a 503.")
    ] = 5.0
    max_waiters: Annotated[
        Count, Meta(description="Long polls parked in one process at once; more are answered as if nothing came.")
    ] = 20_000
    metrics: Annotated[
        Literal["auto", "open", "operator"],
        Meta(description="Who may scrape /metrics: anybody, or an operator's token; `auto` = the token in production."),
    ] = "auto"


class Queues(Section, frozen=True):
    partitions: Annotated[
        int,
        Meta(ge=1, le=4096, description="Partitions of the key space. Fixed at first start: a change is refused."),
    ] = 16
    payload_bytes: Annotated[Count, Meta(description="Largest payload of a task, as compact JSON.")] = 256 * 2**10
    result_bytes: Annotated[Count, Meta(description="Largest result, as compact JSON.")] = 256 * 2**10
    artifact_bytes: Annotated[Count, Meta(description="Largest inline artifact, decoded.")] = 5 * 2**20
    max_attempts: Annotated[Count, Meta(description="Deliveries before a task is dead, where it names none.")] = 5
    max_attempts_limit: Annotated[Count, Meta(description="The most `maxAttempts` a task may ask for.")] = 1000
    lease_seconds: Annotated[Count, Meta(description="Lease where the claim names none.")] = 300
    lease_limit_seconds: Annotated[Count, Meta(description="The longest lease a claim may ask for.")] = 43_200
    batch: Annotated[int, Meta(ge=1, le=1000, description="Tasks or results in one batch request.")] = 100
    claim_batch: Annotated[int, Meta(ge=1, le=1000, description="Tasks one claim may take.")] = 10
    inspect_limit: Annotated[
        int, Meta(ge=1, le=1000, description="Due tasks promoted, and expired leases repaired, by one claim.")
    ] = 200
    horizon_seconds: Annotated[Count, Meta(description="How far ahead a task may be scheduled; later is a 400.")] = (
        366 * 86_400
    )
    retention_seconds: Annotated[Count, Meta(description="How long an ended task stays in Redis.")] = 86_400
    dead_retention_seconds: Annotated[Count, Meta(description="How long a dead letter stays.")] = 7 * 86_400
    backoff: Annotated[BackoffPolicy, Meta(description="How the delay before a retry grows.")] = "exp_full_jitter"
    backoff_base_seconds: Annotated[float, Meta(gt=0, description="The first retry's delay.")] = 5.0
    backoff_cap_seconds: Annotated[float, Meta(gt=0, description="No retry waits longer than this.")] = 900.0
    bloom: Annotated[bool, Meta(description="The three in-process Bloom filters. No answer depends on them.")] = True
    events_alarm: Annotated[
        Count, Meta(description="Entries waiting for the audit in one partition above which an error is logged.")
    ] = 1_000_000
    durability: Annotated[
        Literal["fsync", "relaxed"],
        Meta(description="`fsync` refuses a Redis that acknowledges before the write is on disk (readiness fails)."),
    ] = "fsync"


class Auth(Section, frozen=True):
    validators: Annotated[list[str], Meta(description="Dotted paths tried in order until one knows the token.")] = (
        msgspec.field(
            default_factory=lambda: [
                "tenants.auth.validators.JwksValidator",
                "tenants.auth.validators.TenantKeyValidator",
            ]
        )
    )
    issuer: Annotated[str, Meta(description="`iss` of the tokens accepted from `jwks_url`.")] = "codeq"
    jwks_url: Annotated[
        str, Meta(description="Where the issuer's keys are. Empty = this installation's own key pair.")
    ] = ""
    producer_audience: Annotated[str, Meta(description="`aud` of producers' tokens.")] = "codeq-producer"
    worker_audience: Annotated[str, Meta(description="`aud` of workers' tokens.")] = "codeq-worker"
    leeway_seconds: Annotated[int, Meta(ge=0, le=300, description="Clock skew allowed in `exp` and `nbf`.")] = 60
    cache_seconds: Annotated[int, Meta(ge=0, le=60, description="How long a verified token is not verified again.")] = (
        60
    )
    single_tenant: Annotated[bool, Meta(description="A token without a tenant claim acts for tenant `sub`.")] = False
    provision_tenants: Annotated[
        bool, Meta(description="An unknown tenant in a valid token is created. Refused in production.")
    ] = False
    producer_as_worker: Annotated[
        bool, Meta(description="Producers' tokens may claim (development). Refused in production.")
    ] = False


class Limits(Section, frozen=True):
    """What a tenant may do whose row says nothing. A rate of 0 is no limit."""

    depth: Annotated[int, Meta(ge=0, description="Tasks that may wait in a tenant's queues; 0 = as many as fit.")] = 0
    create_per_second: Annotated[float, Meta(ge=0, description="Tasks a tenant may create each second.")] = 0
    claim_per_second: Annotated[float, Meta(ge=0, description="Claims a tenant may make each second.")] = 0
    admin_per_second: Annotated[float, Meta(ge=0, description="Admin calls a tenant may make each second.")] = 0
    webhook_per_second: Annotated[float, Meta(ge=0, description="Callbacks sent for a tenant each second.")] = 0
    burst_seconds: Annotated[
        float, Meta(gt=0, description="A tenant that was quiet may use so many seconds' worth at once.")
    ] = 2.0
    token_percent: Annotated[
        int, Meta(ge=1, le=100, description="The part of its tenant's rate that one token may use.")
    ] = 100
    idempotency_strict: Annotated[bool, Meta(description="A repeated idempotency key with another body is a 409.")] = (
        False
    )
    lease_token_required: Annotated[
        bool, Meta(description="Workers must send the lease token with all they say about a task.")
    ] = False


class Webhooks(Section, frozen=True):
    allow_hosts: Annotated[
        list[str],
        Meta(description="Networks (CIDR) that callbacks may reach although they are not public."),
    ] = msgspec.field(default_factory=list)
    deadline_seconds: Annotated[float, Meta(gt=0, description="One attempt, from resolving to the last byte.")] = 10.0
    answer_bytes: Annotated[Count, Meta(description="How much of an answer is read.")] = 64 * 2**10
    tries: Annotated[int, Meta(ge=1, le=20, description="Quick tries of a callback, before the tail.")] = 5
    retry_base_seconds: Annotated[float, Meta(gt=0, description="Pause after the first try; doubles each time.")] = 2.0
    retry_cap_seconds: Annotated[float, Meta(gt=0, description="No pause between quick tries is longer.")] = 60.0
    tail_seconds: Annotated[
        list[float], Meta(description="Pauses after the quick tries; empty = given up after them.")
    ] = msgspec.field(default_factory=lambda: [300.0, 900.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 32_400.0])
    slots: Annotated[int, Meta(ge=1, le=2000, description="Callbacks one worker process has under way at once.")] = 128
    slots_per_host: Annotated[
        int, Meta(ge=1, le=2000, description="Of these, to one host for one tenant: what a hanging one can hold.")
    ] = 12
    burst: Annotated[
        int,
        Meta(
            ge=1,
            le=2000,
            description="Of these, begun within 20 ms and not on record yet: about what a killed worker sends twice.",
        ),
    ] = 10
    failures_to_pause: Annotated[
        Count, Meta(description="Failures in a row after which a host is only probed, for one tenant.")
    ] = 20
    probe_seconds: Annotated[float, Meta(gt=0, description="How often a host that is down is probed.")] = 30.0
    disable_after_seconds: Annotated[
        Count, Meta(description="An endpoint that has failed for so long is disabled.")
    ] = 5 * 86_400
    retention_seconds: Annotated[Count, Meta(description="How long finished deliveries stay on record.")] = 30 * 86_400
    subscriptions: Annotated[Count, Meta(description="Subscriptions of one tenant's workers; more is a 403.")] = 1000


class Pipeline(Section, frozen=True):
    lake: Annotated[str, Meta(description="Where the lake is: file:// or s3a://. Empty = under CODEQ_HOME.")] = ""


class Tracing(Section, frozen=True):
    endpoint: Annotated[
        str, Meta(description="Where traces go, OTLP over HTTP: `http://collector:4318/v1/traces`. Empty = no traces.")
    ] = ""
    ratio: Annotated[
        float, Meta(ge=0, le=1, description="The part of the traces begun here that is kept; callers decide theirs.")
    ] = 1.0


class Conf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    home: Annotated[str, Meta(description="Directory of the embedded servers' data, keys and artifacts.")] = "var"
    production: Annotated[bool, Meta(description="Refuses every insecure default: see `manage.py check --deploy`.")] = (
        False
    )
    redis_url: Annotated[str, Meta(description="Valkey or Redis >= 7 of the hot path. Set by REDIS_URL.")] = ""
    redis_cluster: Annotated[
        bool,
        Meta(
            description="REDIS_URL names a node of a Redis Cluster, or several: `redis://a:6379,b:6379`; the others "
            "are learned from it (docs/howto/production.md)."
        ),
    ] = False
    database_url: Annotated[str, Meta(description="PostgreSQL. Set by DATABASE_URL.")] = ""
    broker_url: Annotated[str, Meta(description="Celery's broker. Set by CELERY_BROKER_URL.")] = ""
    artifacts: Annotated[
        str,
        Meta(
            description="Where artifacts are: `file:///a/directory`, or `s3://bucket/prefix?endpoint_url=…` with "
            "`codeq[s3]` installed (docs/howto/artifacts.md). Empty = in `home`."
        ),
    ] = ""
    spark_master: Annotated[str, Meta(description="Where Spark runs. Set by SPARK_MASTER.")] = "local[*]"
    secret_key: Annotated[str, Meta(description="Signs sessions and encrypts stored secrets.")] = ""
    secret_key_fallbacks: Annotated[
        list[str],
        Meta(description="Former values of SECRET_KEY, comma-separated: what they sealed and signed is still read."),
    ] = msgspec.field(default_factory=list)
    allowed_hosts: Annotated[
        list[str], Meta(description="Host names the console answers to; `*` only outside production.")
    ] = msgspec.field(default_factory=lambda: ["localhost", "127.0.0.1", "[::1]"])
    log_format: Annotated[Literal["text", "json"], Meta(description="Log lines for people or for machines.")] = "text"
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Meta(description="Least level logged.")] = "INFO"
    web: Web = Web()
    queues: Queues = Queues()
    auth: Auth = Auth()
    limits: Limits = Limits()
    webhooks: Webhooks = Webhooks()
    pipeline: Pipeline = Pipeline()
    tracing: Tracing = Tracing()

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser().absolute()


def build(values: dict[str, object]) -> Conf:
    """Turn plain values (strings from the environment among them) into a `Conf`, or say which one is wrong."""
    try:
        return msgspec.convert(values, type=Conf, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"codeQ's settings: {error}") from error


@cache
def conf() -> Conf:
    from django.conf import settings

    return build(settings.CODEQ)
