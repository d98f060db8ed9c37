"""`manage.py up` reports why it cannot start: one sentence, exit code 1."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from codeq_site.devserver.embedded import PostgreSQL, Valkey
from tests.codeq_site.installation import Installation
from tests.conftest import free_port

Make = Callable[[], Installation]


def test_port_of_another_program_is_reported(make_installation: Make) -> None:
    own = make_installation()
    with socket.create_server(("127.0.0.1", own.port)):
        assert own.fail_to_start() == (
            f"Port {own.port} is in use: stop the program that uses it, or set another port with --port or CODEQ_PORT."
        )


def test_address_of_another_machine_is_reported(make_installation: Make) -> None:
    assert "CODEQ_WEB_HOST" in make_installation().fail_to_start(CODEQ_WEB_HOST="192.0.2.1")


def test_home_below_a_file_is_reported(tmp_path: Path) -> None:
    # Below a file, because root may write into any directory.
    (tmp_path / "file").write_text("in the way")
    own = Installation(tmp_path / "home")
    own.home = tmp_path / "file" / "home"
    message = own.fail_to_start()
    assert message.startswith(f"Cannot write to {own.home} (Not a directory): set another CODEQ_HOME")


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="needs a directory that root cannot write to, as on Linux")
def test_home_without_write_permission_is_reported(tmp_path: Path) -> None:
    own = Installation(tmp_path / "home")
    own.home = Path("/proc/sys/codeq")
    assert own.fail_to_start().startswith("Cannot write to /proc/sys/codeq (")


def test_damaged_append_only_file_is_reported_and_kept(make_installation: Make) -> None:
    own = make_installation()
    directory = own.home / "valkey"
    server = Valkey(directory, own.home / "valkey.log", own.home / "valkey.sock")
    server.start()
    with redis.Redis.from_url(server.url) as client:
        for number in range(1000):
            client.set(f"key-{number}", "v" * 50)
    server.stop()
    file = next((directory / "appendonlydir").glob("*.incr.aof"))
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = os.urandom(200)
    file.write_bytes(content)

    message = own.fail_to_start()
    assert message.startswith(f"Valkey cannot start from {directory}: Bad file format reading the append only file")
    assert "restore the directory from a backup, or move it away" in message
    assert file.read_bytes() == content, "the damaged file must not be changed"


def test_truncated_append_only_file_is_loaded(valkey_server: Callable[..., Valkey]) -> None:
    server = valkey_server()
    with redis.Redis.from_url(server.url) as client:
        client.set("first", "1")
        client.set("second", "2")
    server.kill()
    file = next((server.data / "appendonlydir").glob("*.incr.aof"))
    file.write_bytes(file.read_bytes()[:-4])
    server.start()
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.mget("first", "second") == ["1", None]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("global/pg_control", b"short", "could not read file"),
        ("PG_VERSION", b"9.6\n", "incompatible"),
        ("PG_VERSION", None, "holds no PostgreSQL database"),
    ],
    ids=["control file cut short", "another version", "no cluster any more"],
)
def test_damaged_postgresql_is_reported(make_installation: Make, file: str, content: bytes | None, reason: str) -> None:
    own = make_installation()
    directory = own.home / "postgresql"
    server = PostgreSQL(directory, own.home / "postgresql.log", own.home / "run" / "postgresql", {"fsync": "off"})
    server.start()
    server.stop()
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    message = own.fail_to_start()
    assert str(directory) in message
    assert reason in message
    assert "move it away" in message


def test_unreachable_redis_is_reported(make_installation: Make) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert "The database cannot be prepared" in make_installation().fail_to_start(REDIS_URL=url)


def test_unreachable_database_is_reported(make_installation: Make) -> None:
    own = make_installation()
    message = own.fail_to_start(DATABASE_URL=f"postgresql://nobody@127.0.0.1:{free_port()}/codeq")
    assert "The database cannot be prepared" in message
    assert "onnection" in message
    assert not (own.home / "postgresql").exists(), "DATABASE_URL replaces the embedded server"


def test_production_requires_servers_and_secret(make_installation: Make) -> None:
    message = make_installation().fail_to_start(CODEQ_PRODUCTION="true", REDIS_URL="redis://valkey.example.com/0")
    assert message == (
        "Production mode does not start embedded servers or create secrets: "
        "set DATABASE_URL, CELERY_BROKER_URL, SECRET_KEY."
    )


def test_unknown_setting_is_reported(make_installation: Make) -> None:
    message = make_installation().fail_to_start(CODEQ_QUEUE_LEASE_SECONDS="60")
    assert message == "CODEQ_QUEUE_LEASE_SECONDS is not a setting. Did you mean CODEQ_QUEUES_LEASE_SECONDS?"


def test_wrong_value_is_reported(make_installation: Make) -> None:
    message = make_installation().fail_to_start(CODEQ_QUEUES_LEASE_SECONDS="soon")
    assert "queues.lease_seconds" in message
