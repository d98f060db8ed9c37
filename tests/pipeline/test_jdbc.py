"""Read the audit through PostgreSQL's JDBC driver, which is not a dependency of codeQ.

The test uses CODEQ_TEST_JDBC=/path/to/postgresql-42.jar, Debian's package, or a jar in Maven's cache.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pipeline.spark.lake import Lake
from tests.pipeline.conftest import FAST_CONF
from tests.pipeline.history import DAY, Audit, build_attempt, count_rows, read_digests

ROOT = Path(__file__).parents[2]
DEBIAN = Path("/usr/share/java/postgresql.jar")
CACHED = Path.home() / ".m2" / "repository" / "org" / "postgresql" / "postgresql"


def find_driver() -> str:
    configured = os.environ.get("CODEQ_TEST_JDBC", "")
    installed = [*sorted(CACHED.glob("*/postgresql-*.jar")), *([DEBIAN] if DEBIAN.is_file() else [])]
    if not (configured or installed):
        pytest.skip("no JDBC driver for PostgreSQL is installed (Debian package: libpostgresql-jdbc-java)")
    return configured or str(installed[-1])


@pytest.fixture
def tcp_dsn(audit: Audit) -> Iterator[str]:
    """The connection string of the audit's database on a TCP port of the loopback.

    The tests' PostgreSQL listens on a Unix socket only, which Java does not support. A proxy forwards the connections.
    """
    parameters = conninfo_to_dict(audit.dsn)
    socket_path = Path(str(parameters["host"])) / f".s.PGSQL.{parameters.get('port') or 5432}"
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(socket_path))
            connections.extend((client, server))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=forward, args=pair, daemon=True).start()

    connections: list[socket.socket] = []
    threading.Thread(target=serve, daemon=True).start()
    yield make_conninfo(audit.dsn, host="127.0.0.1", port=listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in connections:
        connection.close()


@pytest.mark.spec("PIP-1", "With PostgreSQL's JDBC driver on the class path, ingest reads the same rows through it")
def test_ingest_reads_the_same_rows_through_jdbc(
    run: Any, lake: Lake, audit: Audit, tcp_dsn: str, tmp_path: Path
) -> None:
    jar = find_driver()
    error = 'says "no",\r\n\tthen\\N — 日本 🙂 ,""'
    audit.add(
        [
            build_attempt(error=error),
            build_attempt(DAY + timedelta(days=30)),
            build_attempt(claimed_at=None, outcome="CANCELLED"),
        ]
    )
    audit.add([build_attempt(f"{i % 24}:15", wait=i, run=i, tenant_id=f"t{i % 3}") for i in range(100)])
    run("ingest", "attempts")
    jdbc_lake = Lake(str(tmp_path / "jdbc"))
    script = (
        "from pipeline.spark import sources; sources.ROWS_PER_PARTITION = 20\n"
        "read = sources._read_jdbc\n"
        "def read_and_report(*args): print('through JDBC', flush=True); return read(*args)\n"
        "sources._read_jdbc = read_and_report\n"
        "import sys; from pipeline.spark.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    conf = {**FAST_CONF, "spark.jars": jar, "spark.driver.extraClassPath": jar}
    options = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    options += ["run", "ingest", "attempts"]
    process = subprocess.run(
        [sys.executable, "-c", script, "--master", "local[2]", "--dsn-file", "-", "--lake", jdbc_lake.url, *options],
        input=tcp_dsn,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TZ": "America/New_York"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "through JDBC" in process.stdout
    assert count_rows(jdbc_lake) == audit.count_per_partition()
    assert read_digests(jdbc_lake, "attempts") == read_digests(lake, "attempts")
