"""`manage.py up`: its output, its state, and restarts of child processes."""

from __future__ import annotations

import re
import signal
import stat
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from tests.codeq_site.installation import STOP_SECONDS, Installation
from tests.waiting import until


def test_every_step_prints_its_duration(running: Installation) -> None:
    for step in ("PostgreSQL", "Valkey", "Valkey (broker)", "Database", "Web, 1 process", "Celery"):
        assert re.search(rf"^✓ {re.escape(step)} +\d+\.\d s$", running.out, flags=re.M), step
    assert "\x1b" not in running.out


def test_printed_addresses_answer(running: Installation) -> None:
    addresses = re.findall(rf"{running.base}/\S*/", running.out)
    assert f"{running.base}/admin/" in addresses
    for address in {*addresses, f"{running.base}/metrics"} - {address for address in addresses if "/v1/" in address}:
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.status == 200


def test_printed_commands_answer_202_200_200(running: Installation) -> None:
    running.run_printed_commands(seconds=15.0)


def test_printed_password_is_that_of_the_admin(running: Installation) -> None:
    shown = re.search(r"user (\S+), password (\S+)", running.out)
    assert shown is not None
    with psycopg.connect(running.read_embedded_settings()["database_url"]) as connection:
        query = "SELECT password FROM auth_user WHERE username = %s AND is_superuser"
        row = connection.execute(query, (shown[1],)).fetchone()
    assert row is not None
    from django.contrib.auth.hashers import check_password

    assert check_password(shown[2], row[0])


def test_only_the_owner_can_read_secrets_and_sockets(running: Installation) -> None:
    for name in ("embedded.json", "secret_key", "admin_password"):
        assert stat.S_IMODE((running.home / name).stat().st_mode) == 0o600, name
    sockets = [path for path in running.home.rglob("*") if path.is_socket()]
    assert len(sockets) == 3
    for path in sockets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for directory in (running.home, running.home / "run", running.home / "valkey", running.home / "postgresql"):
        assert stat.S_IMODE(directory.stat().st_mode) & 0o066 == 0, directory


def test_no_embedded_server_listens_on_tcp(running: Installation) -> None:
    listening = {
        connection.laddr.port
        for child in running.children()
        for connection in child.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {running.port}


def test_valkey_is_durable(running: Installation) -> None:
    with redis.Redis.from_url(running.read_embedded_settings()["redis_url"], decode_responses=True) as client:
        settings = client.config_get("append*", "maxmemory-policy", "save", "hash-max-listpack-value")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""
    assert settings["hash-max-listpack-value"] == "4096"


def test_broker_is_a_separate_server(running: Installation) -> None:
    urls = running.read_embedded_settings()
    assert urls["broker_url"] != urls["redis_url"]
    with redis.Redis.from_url(urls["broker_url"], decode_responses=True) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}


def test_second_start_on_the_same_home_is_refused(running: Installation) -> None:
    second = Installation(running.home)
    second.out_path, second.err_path = second.out_path.with_suffix(".2"), second.err_path.with_suffix(".2")
    assert running.process is not None
    assert f"codeQ already runs with {running.home} (pid {running.process.pid})" in second.fail_to_start()


def test_port_in_use_is_reported(running: Installation, tmp_path: Path) -> None:
    message = Installation(tmp_path / "home", running.port).fail_to_start()
    assert (
        message == f"Port {running.port} is in use: stop the program that uses it, or set another port with --port or "
        "CODEQ_PORT."
    )


@pytest.mark.parametrize(
    "names",
    [
        # Only Linux shows the names of forked services. Elsewhere they are separate programs.
        ("web-1", "codeq_site.web"),
        ("run/valkey.sock",),
        ("run/broker.sock",),
        ("bin/postgres",),
        ("celery-worker", "celery -A codeq_site --quiet worker"),
        ("celery-beat", "celery -A codeq_site --quiet beat"),
    ],
    ids=["web", "Valkey", "broker", "PostgreSQL", "Celery worker", "Celery beat"],
)
def test_killed_child_is_restarted_and_reported(running: Installation, names: tuple[str, ...]) -> None:
    before = len(running.out)
    victim = running.child(*names)
    victim.kill()
    until(lambda: "runs again" in running.out[before:], 60)
    assert "was killed by SIGKILL; it restarts in" in running.out[before:]
    assert running.child(*names).pid != victim.pid
    until(running.is_ready, 60)
    running.run_printed_commands(seconds=30.0)


def write_key(installation: Installation) -> None:
    with redis.Redis.from_url(installation.read_embedded_settings()["redis_url"]) as client:
        client.set("a-newcomers-task", "kept")


def has_key(installation: Installation) -> bool:
    with redis.Redis.from_url(installation.read_embedded_settings()["redis_url"]) as client:
        return client.get("a-newcomers-task") == b"kept"


def test_stop_is_fast_and_the_next_start_keeps_all_data(make_installation: Callable[[], Installation]) -> None:
    own = make_installation()
    own.start()
    write_key(own)
    password = re.findall(r"password (\S+)", own.out)
    secret = own.read_embedded_settings()["secret_key"]
    children = own.children()
    assert len(children) >= 8

    own.signal(signal.SIGTERM)
    assert own.wait(2 * STOP_SECONDS) == 0
    assert "Stopped in" in own.out
    assert not [child for child in children if child.is_running()]
    assert own.err.count("Traceback") == 0, own.err

    own.start()
    assert has_key(own)
    assert re.findall(r"password (\S+)", own.out) == password != []
    assert own.read_embedded_settings()["secret_key"] == secret

    # The children get no signal: they notice the end of their parent, or the next start stops them.
    children = own.children()
    own.signal(signal.SIGKILL)
    own.wait(30)

    own.start()
    assert has_key(own)
    assert not [child for child in children if child.is_running()]
    own.signal(signal.SIGINT)
    assert own.wait(2 * STOP_SECONDS) == 0
    assert own.err.count("Traceback") == 0, own.err
