"""System checks: what every start needs, and what `manage.py check --deploy` refuses in production.

Both are functions of the settings alone. An id is never given to another problem.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from django.core import checks
from django.core.checks import CheckMessage, Error

from core.conf import Conf, conf

SECRET_CHARACTERS = 50
REDIS_SCHEMES = ("redis", "rediss", "unix")
POSTGRES_SCHEMES = ("postgres", "postgresql")
# Where no callback belongs in production: this machine, and the metadata service of a cloud.
NEVER_ALLOWED = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10")))


def everywhere(conf: Conf) -> Iterator[CheckMessage]:
    """What cannot work anywhere."""
    if urlsplit(conf.redis_url).scheme not in ("", *REDIS_SCHEMES):
        yield Error(
            f"REDIS_URL begins with {urlsplit(conf.redis_url).scheme}://.",
            hint="Write redis://, rediss:// (TLS) or unix:// before the address of a Valkey, or a Redis from 7 on.",
            id="codeq.E001",
        )
    if urlsplit(conf.database_url).scheme not in ("", *POSTGRES_SCHEMES):
        yield Error(
            f"DATABASE_URL begins with {urlsplit(conf.database_url).scheme}://, and only PostgreSQL will do.",
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
        yield from _unfit_for_a_cluster(conf)
    artifacts = urlsplit(conf.artifacts)
    if artifacts.scheme not in ("", "file", "s3") or (artifacts.scheme == "s3" and not artifacts.netloc):
        yield Error(
            "CODEQ_ARTIFACTS names no storage that codeQ knows.",
            hint="Write file:///a/directory, or s3://bucket/prefix?endpoint_url=…&region_name=…",
            id="codeq.E004",
        )


def deployed(conf: Conf) -> Iterator[CheckMessage]:
    """What works on one machine for one person, and is not fit for production."""
    if not conf.production:
        yield Error(
            "Production mode is off: insecure defaults are in force.",
            hint="Set CODEQ_PRODUCTION=true.",
            id="codeq.E010",
        )
    if len(conf.secret_key) < SECRET_CHARACTERS or conf.secret_key.startswith("insecure"):
        yield Error(
            f"SECRET_KEY is missing, or has fewer than {SECRET_CHARACTERS} characters.",
            hint="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(64))'. It seals stored "
            "secrets too, so keep it.",
            id="codeq.E011",
        )
    if "*" in conf.allowed_hosts or not conf.allowed_hosts:
        yield Error(
            "CODEQ_ALLOWED_HOSTS lets the console answer to any host name.",
            hint="Name the hosts the console is reached by, separated by commas.",
            id="codeq.E012",
        )
    if conf.auth.provision_tenants:
        yield Error(
            "CODEQ_AUTH_PROVISION_TENANTS lets a token create tenants.",
            hint="Unset it, and create tenants in the console.",
            id="codeq.E013",
        )
    if conf.auth.producer_as_worker:
        yield Error(
            "CODEQ_AUTH_PRODUCER_AS_WORKER lets producers' tokens claim tasks.",
            hint="Unset it, and give workers tokens of their own.",
            id="codeq.E014",
        )
    if conf.auth.jwks_url and urlsplit(conf.auth.jwks_url).scheme != "https":
        yield Error(
            "CODEQ_AUTH_JWKS_URL is not https: whoever can change what it answers can sign any token.",
            hint="Fetch the keys over https.",
            id="codeq.E015",
        )
    if conf.queues.durability != "fsync":
        yield Error(
            "CODEQ_QUEUES_DURABILITY=relaxed: an acknowledged task may be lost with the machine.",
            hint="Set it to fsync, and appendfsync always in Valkey.",
            id="codeq.E016",
        )
    yield from _missing_servers(conf)
    yield from _opened_networks(conf)
    if conf.log_level == "DEBUG":
        yield checks.Warning(
            "CODEQ_LOG_LEVEL=DEBUG: libraries write what they send and receive into the log.",
            hint="Set it to INFO.",
            id="codeq.W018",
        )


def _unfit_for_a_cluster(conf: Conf) -> Iterator[CheckMessage]:
    nodes = _servers(conf.redis_url)
    if not nodes:
        yield Error(
            "CODEQ_REDIS_CLUSTER is set, and REDIS_URL names no node of a cluster.",
            hint="Write redis://host:port, or rediss://; several nodes as redis://a:6379,b:6379.",
            id="codeq.E005",
        )
    if nodes & _servers(conf.broker_url):
        yield Error(
            "CELERY_BROKER_URL names a node of the Redis Cluster: Celery does not speak to clusters.",
            hint="Give Celery a server of its own: another Valkey, or whatever else it speaks.",
            id="codeq.E006",
        )


def _servers(url: str) -> set[str]:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        return set()
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return {host if ":" in host.rpartition("]")[2] else f"{host}:6379" for host in hosts if host}


def _missing_servers(conf: Conf) -> Iterator[CheckMessage]:
    urls = {
        "REDIS_URL": conf.redis_url,
        "DATABASE_URL": conf.database_url,
        "CELERY_BROKER_URL": conf.broker_url,
    }
    for name, url in urls.items():
        if not url or str(conf.home_path) in url:
            yield Error(
                f"{name} is missing, or names a server that `manage.py up` runs for itself.",
                hint="Name a server that is run, watched and backed up for its own sake.",
                id="codeq.E017",
            )


def _opened_networks(conf: Conf) -> Iterator[CheckMessage]:
    for text in conf.webhooks.allow_hosts:
        try:
            network: Any = ipaddress.ip_network(text)
        except ValueError:
            continue  # codeq.E003
        if any(network.version == never.version and network.overlaps(never) for never in NEVER_ALLOWED):
            yield Error(
                f"CODEQ_WEBHOOKS_ALLOW_HOSTS lets callbacks reach {text}: the server's own machine, or a cloud's "
                "metadata service.",
                hint="Name only the networks where your receivers are.",
                id="codeq.E019",
            )
        elif network.is_private:
            yield checks.Warning(
                f"CODEQ_WEBHOOKS_ALLOW_HOSTS lets every tenant's callbacks reach the private network {text}.",
                hint="Keep it as small as the receivers need.",
                id="codeq.W020",
            )


@checks.register("codeq")
def check_settings(**_: object) -> list[CheckMessage]:
    return list(everywhere(conf()))


@checks.register("codeq", deploy=True)
def check_deployment(**_: object) -> list[CheckMessage]:
    return list(deployed(conf()))
