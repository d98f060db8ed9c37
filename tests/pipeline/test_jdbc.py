"""Reading the audit through PostgreSQL's own Java driver, where somebody has it: it is in no package of ours.

CODEQ_TEST_JDBC=/path/to/postgresql-42.jar, or Debian's, or one in Maven's cache.
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
from tests.pipeline.conftest import QUICK
from tests.pipeline.history import DAY, Audit, attempt, counts, digests

ROOT = Path(__file__).parents[2]
DEBIAN = Path("/usr/share/java/postgresql.jar")
CACHED = Path.home() / ".m2" / "repository" / "org" / "postgresql" / "postgresql"


def driver() -> str:
    named = os.environ.get("CODEQ_TEST_JDBC", "")
    found = [*sorted(CACHED.glob("*/postgresql-*.jar")), *([DEBIAN] if DEBIAN.is_file() else [])]
    if not (named or found):
        pytest.skip("there is no JDBC driver of PostgreSQL here: Debian has it in libpostgresql-jdbc-java")
    return named or str(found[-1])


@pytest.fixture
def by_port(audit: Audit) -> Iterator[str]:
    """The audit's database by a port of the loopback: the tests' PostgreSQL has only a socket, which Java cannot speak
    to. What comes in at the one goes out at the other."""
    said = conninfo_to_dict(audit.dsn)
    at = Path(str(said["host"])) / f".s.PGSQL.{said.get('port') or 5432}"
    listening = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while True:
            try:
                outside, _ = listening.accept()
            except OSError:
                return
            inside = socket.socket(socket.AF_UNIX)
            inside.connect(str(at))
            opened.extend((outside, inside))
            for pair in ((outside, inside), (inside, outside)):
                threading.Thread(target=pass_on, args=pair, daemon=True).start()

    opened: list[socket.socket] = []
    threading.Thread(target=serve, daemon=True).start()
    yield make_conninfo(audit.dsn, host="127.0.0.1", port=listening.getsockname()[1])
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for each in opened:
        each.close()


@pytest.mark.spec("PIP-1", "With PostgreSQL's JDBC driver on the class path, ingest reads the same rows through it")
def test_ingest_reads_the_same_through_jdbc(run: Any, lake: Lake, audit: Audit, by_port: str, tmp_path: Path) -> None:
    jar = driver()
    odd = 'says "no",\r\n\tthen\\N — 日本 🙂 ,""'
    audit.add([attempt(error=odd), attempt(DAY + timedelta(days=30)), attempt(claimed_at=None, outcome="CANCELLED")])
    audit.add([attempt(f"{i % 24}:15", wait=i, run=i, tenant_id=f"t{i % 3}") for i in range(100)])
    run("ingest", "attempts")
    there = Lake(str(tmp_path / "there"))
    script = (
        "from pipeline.spark import sources; sources.ROWS_PER_PARTITION = 20\n"
        "read = sources._read_jdbc\n"
        "def told(*given): print('through JDBC', flush=True); return read(*given)\n"
        "sources._read_jdbc = told\n"
        "import sys; from pipeline.spark.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    conf = {**QUICK, "spark.jars": jar, "spark.driver.extraClassPath": jar}
    words = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    words += ["run", "ingest", "attempts"]
    told = subprocess.run(
        [sys.executable, "-c", script, "--master", "local[2]", "--dsn-file", "-", "--lake", there.url, *words],
        input=by_port,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TZ": "America/New_York"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert "through JDBC" in told.stdout
    assert counts(there) == audit.totals()
    assert digests(there, "attempts") == digests(lake, "attempts")
