"""System checks of the settings.

`manage.py check` reports `general_problems` and `former_name_warnings`; `manage.py check --deploy` also reports
`deployment_problems`. These depend on the settings alone; only `check_redis` connects to a server. An id is never
reused for another problem.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import redis
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error

from core.conf import Conf, conf, replace_former_names
from core.errors import ConfigError
from core.redis.connections import client, primaries
from queues.readiness import allocator_warning

SECRET_CHARACTERS = 50
REDIS_SCHEMES = ("redis", "rediss", "unix")
POSTGRES_SCHEMES = ("postgres", "postgresql")
# Networks that callbacks must not reach in production: this machine, and the metadata services of clouds.
NEVER_ALLOWED = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10")))


def general_problems(conf: Conf) -> Iterator[CheckMessage]:
    """Yield the settings that cannot work in any installation."""
    if urlsplit(conf.redis_url).scheme not in ("", *REDIS_SCHEMES):
        yield Error(
            f"REDIS_URL begins with {urlsplit(conf.redis_url).scheme}://.",
            hint="Write redis://, rediss:// (TLS) or unix:// before the address of a Valkey or Redis (7.2 or newer).",
            id="codeq.E001",
        )
    if urlsplit(conf.database_url).scheme not in ("", *POSTGRES_SCHEMES):
        yield Error(
            f"DATABASE_URL begins with {urlsplit(conf.database_url).scheme}://, but codeQ needs PostgreSQL.",
            hint="Write postgresql://user:password@host/database.",
            id="codeq.E002",
        )
    for text in conf.webhooks.allow_hosts:
        try:
            ipaddress.ip_network(text)
        except ValueError:
            yield Error(
                f"CODEQ_WEBHOOKS_ALLOW_HOSTS: {text} is not a network.",
                hint="Write networks such as 10.20.0.0/16 or fd00:20::/32, separated by commas.",
                id="codeq.E003",
            )
    if conf.redis_cluster:
        yield from _cluster_problems(conf)
    artifacts = urlsplit(conf.artifacts)
    if artifacts.scheme not in ("", "file", "s3") or (artifacts.scheme == "s3" and not artifacts.netloc):
        yield Error(
            "CODEQ_ARTIFACTS is not the URL of a supported storage.",
            hint="Write file:///a/directory, or s3://bucket/prefix?endpoint_url=…&region_name=…",
            id="codeq.E004",
        )


def deployment_problems(conf: Conf) -> Iterator[CheckMessage]:
    """Yield the settings that are convenient for development and not safe in production."""
    if not conf.production:
        yield Error(
            "Production mode is off: insecure defaults are in force.",
            hint="Set CODEQ_PRODUCTION=true.",
            id="codeq.E010",
        )
    if len(conf.secret_key) < SECRET_CHARACTERS or conf.secret_key.startswith("insecure"):
        yield Error(
            f"SECRET_KEY is missing, or has fewer than {SECRET_CHARACTERS} characters.",
            hint="Create one with: python -c 'import secrets; print(secrets.token_urlsafe(64))'. It also "
            "encrypts stored secrets, so back it up.",
            id="codeq.E011",
        )
    if "*" in conf.allowed_hosts or not conf.allowed_hosts:
        yield Error(
            "CODEQ_ALLOWED_HOSTS accepts any host name.",
            hint="List the host names of the console, separated by commas.",
            id="codeq.E012",
        )
    if conf.auth.provision_tenants:
        yield Error(
            "CODEQ_AUTH_PROVISION_TENANTS lets a token create tenants.",
            hint="Unset it and create tenants in the console.",
            id="codeq.E013",
        )
    if conf.auth.producer_as_worker:
        yield Error(
            "CODEQ_AUTH_PRODUCER_AS_WORKER lets producers' tokens claim tasks.",
            hint="Unset it and issue workers their own tokens.",
            id="codeq.E014",
        )
    if conf.auth.jwks_url and urlsplit(conf.auth.jwks_url).scheme != "https":
        yield Error(
            "CODEQ_AUTH_JWKS_URL is not https: an attacker who can change the response can sign any token.",
            hint="Use an https URL.",
            id="codeq.E015",
        )
    if conf.queues.durability != "fsync":
        yield Error(
            "CODEQ_QUEUES_DURABILITY=relaxed: acknowledged tasks can be lost when Redis' machine crashes.",
            hint="Set it to fsync, and set `appendfsync always` in Valkey.",
            id="codeq.E016",
        )
    yield from _embedded_server_problems(conf)
    yield from _network_problems(conf)
    if conf.log_level == "DEBUG":
        yield checks.Warning(
            "CODEQ_LOG_LEVEL=DEBUG: libraries log the data that they send and receive.",
            hint="Set it to INFO.",
            id="codeq.W018",
        )


def _cluster_problems(conf: Conf) -> Iterator[CheckMessage]:
    nodes = _servers(conf.redis_url)
    if not nodes:
        yield Error(
            "CODEQ_REDIS_CLUSTER is set, but REDIS_URL has no host of a cluster node.",
            hint="Write redis://host:port, or rediss:// (TLS); several nodes as redis://a:6379,b:6379.",
            id="codeq.E005",
        )
    if nodes & _servers(conf.broker_url):
        yield Error(
            "CELERY_BROKER_URL names a node of the Redis Cluster, but Celery does not support clusters.",
            hint="Use a separate server: another Valkey, or any other broker that Celery supports.",
            id="codeq.E006",
        )


def _servers(url: str) -> set[str]:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        return set()
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return {host if ":" in host.rpartition("]")[2] else f"{host}:6379" for host in hosts if host}


def _embedded_server_problems(conf: Conf) -> Iterator[CheckMessage]:
    urls = {
        "REDIS_URL": conf.redis_url,
        "DATABASE_URL": conf.database_url,
        "CELERY_BROKER_URL": conf.broker_url,
    }
    for name, url in urls.items():
        if not url or str(conf.home_path) in url:
            yield Error(
                f"{name} is missing, or names a server that `manage.py up` runs.",
                hint="Name a server that is operated, monitored and backed up independently of codeQ's processes.",
                id="codeq.E017",
            )


def _network_problems(conf: Conf) -> Iterator[CheckMessage]:
    for text in conf.webhooks.allow_hosts:
        try:
            network: Any = ipaddress.ip_network(text)
        except ValueError:
            continue  # codeq.E003
        if any(network.version == never.version and network.overlaps(never) for never in NEVER_ALLOWED):
            yield Error(
                f"CODEQ_WEBHOOKS_ALLOW_HOSTS allows {text}, which contains this machine or a cloud's metadata service.",
                hint="List only the networks of your endpoints.",
                id="codeq.E019",
            )
        elif network.is_private:
            yield checks.Warning(
                f"CODEQ_WEBHOOKS_ALLOW_HOSTS allows the callbacks of every tenant to reach the private network {text}.",
                hint="List only the networks that your endpoints need.",
                id="codeq.W020",
            )


def former_name_warnings(values: Mapping[str, Any]) -> Iterator[CheckMessage]:
    """Yield a warning for each former name in `settings.CODEQ`."""
    _, warnings = replace_former_names(values)
    for text in warnings:
        yield checks.Warning(
            text, hint="Change it before the next release (docs/howto/production.md).", id="codeq.W021"
        )


@checks.register("codeq")
def check_settings(**_: object) -> list[CheckMessage]:
    return [*general_problems(conf()), *former_name_warnings(settings.CODEQ)]


@checks.register("codeq", deploy=True)
def check_deployment(**_: object) -> list[CheckMessage]:
    return list(deployment_problems(conf()))


@checks.register("codeq", checks.Tags.database)
def check_redis(*, databases: Collection[str] | None = None, **_: object) -> list[CheckMessage]:
    """Check the running Redis.

    It runs only in `manage.py check --database default` and `manage.py migrate`, which pass `databases`. A Redis that
    does not answer is a warning, so that the database can be migrated without it.
    """
    if not databases:
        return []
    try:
        servers = primaries(client())
        has_warning = any(allocator_warning(server.info("memory")) for server in servers.values())
    except (redis.RedisError, OSError, ConfigError) as error:
        return [
            checks.Warning(f"Redis does not answer: {type(error).__name__}.", hint="Check REDIS_URL.", id="codeq.W022")
        ]
    if not has_warning:
        return []
    return [
        checks.Warning(
            "Redis uses the memory allocator of the C library: its CPU and memory per task grow with time.",
            hint="Use a Valkey or Redis built with jemalloc, or preload jemalloc and set CODEQ_REDIS_ALLOCATOR.",
            id="codeq.W023",
        )
    ]
