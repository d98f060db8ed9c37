"""Start a Valkey and a PostgreSQL for each xdist worker, and define fixtures for all tests.

Both servers use unix sockets, whose paths are known before the servers run, so the settings can name them. This module
sets DJANGO_SETTINGS_MODULE itself, because pytest-django would load the settings before the paths are known.
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
    # The results of the tests must not depend on the settings of a developer's shell.
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
    raise pytest.UsageError(
        "Unset DJANGO_SETTINGS_MODULE: the tests set it when they know the addresses of their servers."
    )
_set_environment()
atexit.register(_clean_up)
django.setup()
# The passwords of the tests need no slow hash.
settings.PASSWORD_HASHERS.insert(0, "django.contrib.auth.hashers.MD5PasswordHasher")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Keep the xdist workers, which inherit this environment, from loading the settings early."""
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """The Valkey of this xdist worker, without persistence.

    REDIS_URL is its database 0 and CELERY_BROKER_URL its database 1.
    """
    _valkey.start()
    yield _valkey
    _valkey.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The PostgreSQL of this xdist worker. Tests with the mark `django_db` use it."""
    _postgresql.start()
    yield _postgresql
    _postgresql.stop()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgresql: PostgreSQL) -> None:
    """Start PostgreSQL before pytest-django creates the test database."""


# Django fills these tables when it migrates, and again after a flush.
_KEPT = {"django_migrations", "django_content_type", "auth_permission"}
_SMALL_BYTES = 2**20
_flush = TransactionTestCase._fixture_teardown


def _empty_tables(case: TransactionTestCase) -> None:
    """Delete all rows after a test that commits.

    Django truncates every table, also empty ones, which takes ten times as long.
    """
    names = [name for name in connection.introspection.django_table_names(only_existing=True) if name not in _KEPT]
    sizes = " UNION ALL ".join(
        f"SELECT '{name}', pg_relation_size('{name}') WHERE EXISTS (SELECT FROM {name})" for name in names
    )
    with connection.cursor() as cursor:
        cursor.execute(sizes)
        filled = dict(cursor.fetchall())
    if max(filled.values(), default=0) > _SMALL_BYTES:
        _flush(case)  # deleted rows would stay in the table's pages and change the query plans of later tests
    elif filled:
        deletions = "".join(f"DELETE FROM {name};" for name in filled)
        with connection.cursor() as cursor:  # in any order, because foreign keys are not checked
            cursor.execute(f"BEGIN; SET LOCAL session_replication_role = replica; {deletions} COMMIT")


TransactionTestCase._fixture_teardown = _empty_tables  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def _flusher(valkey: Valkey) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(valkey.url)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _empty_valkey(_flusher: redis.Redis) -> None:
    """Empty Valkey before each test."""
    _flusher.flushall()


# Below the range from which the system assigns ports to outgoing connections. Otherwise a connection could take the
# port before the server of a test listens on it.
_ports = cycle(random.sample(range(15_000, 32_000), 17_000))


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


class ValkeyFactory(Protocol):
    def __call__(self, **config: str) -> Valkey: ...


@pytest.fixture
def valkey_server() -> Iterator[ValkeyFactory]:
    """Start further Valkeys, for example `server = valkey_server(appendfsync="everysec")`.

    Arguments are settings of valkey.conf; the defaults are those of production. A `port` other than 0 listens on TCP. A
    server can be stopped, killed with SIGKILL, and started again on the same data.
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
    """Start further PostgreSQLs, with fsync: `server = postgres_server(max_connections="10")`."""
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


# Tests that share a slow start, such as `manage.py up`, Spark or a cluster, or that measure their process, run in one
# xdist worker: path prefix -> group. The scheduler below groups them, so `--dist` and the mark `xdist_group` have no
# effect.
TOGETHER = {
    "tests/codeq_site/test_up.py": "up",
    "tests/codeq_site/test_readme.py": "up",
    "tests/codeq_site/test_logs_without_secrets.py": "up",
    "tests/codeq_site/test_forked.py": "up",
    "tests/codeq_site/test_tutorial.py": "up",
    "tests/pipeline/": "spark",
    "tests/browser/": "browser",
    "tests/faults/test_cluster.py": "cluster",
    "tests/queues/test_bloom.py": "bloom",
    "tests/queues/api/test_artifacts_s3.py": "artifacts_s3",
    "tests/queues/api/test_codeq_client.py": "codeq_client",
    "tests/queues/api/test_memory.py": "memory",
    "tests/queues/api/test_network.py": "network",
}
# The longest tests run first. If they ran last, the other workers would be idle in the meantime. The tests
# that mostly wait (faults, killed senders) run while Spark and the fuzzer use a core each. The browser needs a core as
# well, so it follows.
LONGEST_FIRST = (
    "tests/pipeline/",
    "tests/codeq_site/test_schemathesis.py",
    "tests/faults/",
    "tests/webhooks/test_crash.py",
    "tests/browser/",
    "tests/codeq_site/test_up.py",
    "tests/codeq_site/test_readme.py",
    "tests/codeq_site/test_logs_without_secrets.py",
    "tests/queues/engine/test_model.py",
    "tests/codeq_site/test_docs_production.py",
    "tests/concurrency/",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        ranks = (rank for rank, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix))
        return next(ranks, len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group for prefix, group in TOGETHER.items() if nodeid.startswith(prefix)), nodeid)

    config.option.loadscopereorder = False  # keep the order of LONGEST_FIRST
    return ByGroup(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report skipped tests as an error if CODEQ_TEST_NO_SKIPS is set, as in CI."""
    if os.environ.get("CODEQ_TEST_NO_SKIPS") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("Tests were skipped, and CODEQ_TEST_NO_SKIPS is set.", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CODEQ_TEST_NO_SKIPS") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
