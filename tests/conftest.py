"""A real Valkey and a real PostgreSQL for the whole run: one of each per xdist worker, on unix sockets.

Their addresses are known before they run, so the settings can be loaded at once.
pytest-django reads DJANGO_SETTINGS_MODULE too early for that; therefore it is set here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Protocol

import django
import pytest
import redis
from django.conf import settings
from django.db import connection
from django.test import TransactionTestCase

from codeq_site import env
from codeq_site.devserver.embedded import DURABLE, PostgreSQL, Valkey

pytest_plugins = ["tests.fixtures.queues"]

ROOT = Path(tempfile.mkdtemp(prefix="codeq-t"))
_owner = os.getpid()

_valkey = Valkey(ROOT / "valkey", ROOT / "valkey.log", ROOT / "valkey.sock", {**DURABLE, "appendonly": "no"})
_postgresql = PostgreSQL(
    ROOT / "postgresql",
    ROOT / "postgresql.log",
    ROOT / "sockets",
    {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "64MB"},
)


def _set_environment() -> None:
    # A developer's own settings must not decide what the tests see.
    for name in [*env.names(), *os.environ]:
        if name in env.names() or (name.startswith("CODEQ_") and not name.startswith(env.IGNORED_PREFIXES)):
            os.environ.pop(name, None)
    os.environ.update(
        DJANGO_SETTINGS_MODULE="codeq_site.settings",
        CODEQ_HOME=str(ROOT / "home"),
        REDIS_URL=_valkey.url,
        CELERY_BROKER_URL=_valkey.url.replace("db=0", "db=1"),
        DATABASE_URL=_postgresql.url,
        SECRET_KEY="a-key-that-only-the-tests-use-" + "x" * 32,
        CODEQ_REDIS_ALLOCATOR=_valkey.allocator.name if _valkey.allocator else "",
    )


def _clean_up() -> None:
    if os.getpid() == _owner:
        for server in (_valkey, _postgresql):
            server.kill()
        shutil.rmtree(ROOT, ignore_errors=True)


if settings.configured:
    raise pytest.UsageError("Unset DJANGO_SETTINGS_MODULE: the tests name the settings after their servers.")
_set_environment()
atexit.register(_clean_up)
django.setup()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """xdist's workers inherit this environment, and must not load the settings before this file has run there."""
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """This worker's Valkey: REDIS_URL is its database 0, CELERY_BROKER_URL its database 1. Nothing is kept on disk."""
    _valkey.start()
    yield _valkey
    _valkey.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """This worker's PostgreSQL; tests with `django_db` get it by themselves."""
    _postgresql.start()
    yield _postgresql
    _postgresql.stop()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgresql: PostgreSQL) -> None:
    """pytest-django's hook before the test database is made: the server must run by then."""


# Django makes these itself, and again after every flush of the others.
_KEPT = {"django_migrations", "django_content_type", "auth_permission"}
_SMALL_BYTES = 2**20
_flush = TransactionTestCase._fixture_teardown


def _empty_tables(case: TransactionTestCase) -> None:
    """What Django does after a test that commits, for a tenth: it truncates every table, be there rows in it or not."""
    names = [name for name in connection.introspection.django_table_names(only_existing=True) if name not in _KEPT]
    sizes = " UNION ALL ".join(
        f"SELECT '{name}', pg_relation_size('{name}') WHERE EXISTS (SELECT FROM {name})" for name in names
    )
    with connection.cursor() as cursor:
        cursor.execute(sizes)
        filled = dict(cursor.fetchall())
    if max(filled.values(), default=0) > _SMALL_BYTES:
        _flush(case)  # what is deleted stays on its pages, for the plans of later tests to reckon with
    elif filled:
        deletions = "".join(f"DELETE FROM {name};" for name in filled)
        with connection.cursor() as cursor:  # in any order: no key is looked after meanwhile
            cursor.execute(f"BEGIN; SET LOCAL session_replication_role = replica; {deletions} COMMIT")


TransactionTestCase._fixture_teardown = _empty_tables  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def _flusher(valkey: Valkey) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(valkey.url)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _empty_valkey(_flusher: redis.Redis) -> None:
    """Every test begins with an empty Valkey."""
    _flusher.flushall()


# Below those that the system gives to outgoing connections: one of them would take the port before it is used.
_ports = cycle(random.sample(range(15_000, 32_000), 17_000))


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


class ValkeyFactory(Protocol):
    def __call__(self, **config: str) -> Valkey: ...


@pytest.fixture
def valkey_server() -> Iterator[ValkeyFactory]:
    """Start Valkeys of one's own: `server = valkey_server(appendfsync="everysec", cluster_enabled="yes")`.

    Durable as in production unless told otherwise; `port="0"` is a unix socket, another port is TCP on the loopback.
    `.url .pid .data .log`, `.stop()` orderly, `.kill()` by SIGKILL, `.start()` again on the same data.
    """
    directory = Path(tempfile.mkdtemp(prefix="codeq-v"))
    servers: list[Valkey] = []

    def make(**config: str) -> Valkey:
        number = len(servers)
        settings = {**DURABLE, **{name.replace("_", "-"): value for name, value in config.items()}}
        server = Valkey(directory / f"{number}", directory / f"{number}.log", directory / f"{number}.sock", settings)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.kill()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def postgres_server() -> Iterator[Callable[..., PostgreSQL]]:
    """Start PostgreSQLs of one's own: `server = postgres_server(max_connections="10")`; fsync is on."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-p"))
    servers: list[PostgreSQL] = []

    def make(**settings: str) -> PostgreSQL:
        number = len(servers)
        server = PostgreSQL(directory / f"{number}", directory / f"{number}.log", directory / f"{number}.s", settings)
        servers.append(server)
        server.start()
        server.ensure_database()
        return server

    yield make
    for server in servers:
        server.stop(2)
    shutil.rmtree(directory, ignore_errors=True)


# Whose tests share something that takes long to start, an `up` or a Spark: they stay on one xdist worker.
# xdist's own `--dist loadgroup` does nothing under pytest 9.
TOGETHER = {
    "tests/codeq_site/test_up.py": "up",
    "tests/codeq_site/test_readme.py": "up",
    "tests/codeq_site/test_canaries.py": "up",
    "tests/pipeline/": "spark",
    "tests/browser/": "browser",
    "tests/faults/test_cluster.py": "cluster",
    "tests/queues/test_bloom.py": "bloom",
}
# What takes longest begins first: begun last, it would run on while the other workers have nothing left to do.
LONGEST_FIRST = (
    "tests/pipeline/",
    "tests/codeq_site/test_schemathesis.py",
    "tests/browser/",
    "tests/codeq_site/test_up.py",
    "tests/codeq_site/test_readme.py",
    "tests/codeq_site/test_canaries.py",
    "tests/faults/",
    "tests/webhooks/test_crash.py",
    "tests/queues/engine/test_model.py",
    "tests/codeq_site/test_docs_production.py",
    "tests/concurrency/",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        rooms = (rank for rank, room in enumerate(LONGEST_FIRST) if item.nodeid.startswith(room))
        return next(rooms, len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((shared for room, shared in TOGETHER.items() if nodeid.startswith(room)), nodeid)

    config.option.loadscopereorder = False  # the order above, and not by the number of tests
    return ByRoom(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where CODEQ_TEST_NO_SKIPS is set (CI), a skipped test is a failed run: it says what the machine lacks."""
    if os.environ.get("CODEQ_TEST_NO_SKIPS") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("Tests were skipped, and CODEQ_TEST_NO_SKIPS is set.", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CODEQ_TEST_NO_SKIPS") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
