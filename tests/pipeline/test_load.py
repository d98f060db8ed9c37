"""Loads of datasets: each row becomes one task, even if requests fail."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from core.redis.connections import client
from pipeline.spark import load as loading
from pipeline.spark.lake import Lake
from pipeline.spark.load import LoadRejected, LoadTarget, add_idempotency_keys, load, read_dataset
from queues import selectors
from tenants import services as tenants
from tenants.cache import tenant_cache
from tests.conftest import free_port
from tests.pipeline.history import Audit
from tests.waiting import until


class FakeApi(ThreadingHTTPServer):
    """A substitute for the API that fails on demand, and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.counts_by_key: Counter[str] = Counter()
        self.payloads: dict[str, Any] = {}
        # Responses to the next requests: a status, or "drop" and "late drop", which close the connection before and
        # after the tasks are stored.
        self.responses: list[Any] = []
        self.rejected_text = ""  # tasks that contain this text get an error
        self.requests = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeApi

    def log_message(self, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests += 1
            response = self.server.responses.pop(0) if self.server.responses else 200
        if response == "drop":
            self.connection.close()
            self.close_connection = True
            return
        if response in (200, "late drop"):
            with self.server.lock:
                for task in body["tasks"]:
                    self.server.counts_by_key[task["idempotencyKey"]] += 1
                    self.server.payloads[task["idempotencyKey"]] = task["payload"]
        if response == "late drop":
            self.connection.close()
            self.close_connection = True
            return
        items = [
            {"error": {"code": "invalid_request", "detail": "no"}}
            if self.server.rejected_text and self.server.rejected_text in json.dumps(task)
            else {"task": {}}
            for task in body["tasks"]
        ]
        content = json.dumps({"results": items} if response == 200 else {"detail": "not now"}).encode()
        self.send_response(response)
        self.send_header("Content-Length", str(len(content)))
        if response in (429, 503):
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def fake_api() -> Iterator[FakeApi]:
    server = FakeApi()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def write_rows(tmp_path: Path, count: int, name: str = "rows.jsonl") -> str:
    file = tmp_path / name
    file.write_text("".join(f'{{"n": {i}, "who": "é{i}"}}\n' for i in range(count)))
    return str(file)


def test_each_row_is_sent_once(spark: Any, lake: Lake, fake_api: FakeApi, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    target = LoadTarget(fake_api.url, "token", "import", batch=100)
    result = load(
        spark, lake, write_rows(tmp_path, 950), target, key="n", on_progress=lambda *values: progress.append(values)
    )
    assert (result.rows, result.sent, result.refused, result.quarantined, result.resumed) == (950, 950, 0, 0, False)
    assert sorted(payload["n"] for payload in fake_api.payloads.values()) == list(range(950))
    assert set(fake_api.counts_by_key.values()) == {1}
    assert progress[-1] == (950, 950)
    # The same load again is recognised, and nothing is sent.
    repeated = load(spark, lake, write_rows(tmp_path, 950), target, key="n")
    assert (repeated.sent, repeated.resumed) == (950, True)
    assert set(fake_api.counts_by_key.values()) == {1}


def test_number_keeps_all_its_digits(spark: Any, lake: Lake, fake_api: FakeApi, tmp_path: Path) -> None:
    text = '{"big": 12345678901234567890123, "exact": 1.10, "b": {"z": [], "a": {}}}'
    (tmp_path / "one.json").write_text(text + "\n")
    sent: list[bytes] = []
    original = Handler.do_POST

    def record_body(self: Handler) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent.append(body)
        self.rfile = __import__("io").BytesIO(body)
        original(self)

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(Handler, "do_POST", record_body)
        load(spark, lake, str(tmp_path / "one.json"), LoadTarget(fake_api.url, "token", "import"))
    assert f'"payload":{text}'.encode() in sent[0]


def test_failed_request_is_sent_again(spark: Any, lake: Lake, fake_api: FakeApi, tmp_path: Path) -> None:
    fake_api.responses = [503, "drop", 429, "late drop", 200, "drop", 500]
    target = LoadTarget(fake_api.url, "token", "import", batch=50)
    result = load(spark, lake, write_rows(tmp_path, 300), target, key="n")
    assert result.sent == 300
    assert len(fake_api.counts_by_key) == 300
    # After a lost response, the same rows arrive twice with the same keys.
    assert max(fake_api.counts_by_key.values()) == 2


def test_interrupted_load_is_resumed(
    spark: Any, lake: Lake, fake_api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "ROWS_PER_BUCKET", 100)
    monkeypatch.setattr(loading, "BUCKETS_PER_WAVE", 2)
    target = LoadTarget(fake_api.url, "token", "import")
    fake_api.responses = [200] * 6 + [403] * 100
    source = write_rows(tmp_path, 1000)
    with pytest.raises(Exception, match="403"):
        load(spark, lake, source, target, key="n")
    before = dict(fake_api.counts_by_key)
    assert 0 < len(before) < 1000
    fake_api.responses = []
    Path(source).write_text("")  # the load continues with the staged rows, not with the changed file
    result = load(spark, lake, source, target, key="n")
    assert (result.rows, result.sent, result.resumed) == (1000, 1000, True)
    assert len(fake_api.counts_by_key) == 1000
    assert sum(fake_api.counts_by_key.values()) < 1000 + 4 * 100, "accepted buckets are not sent again"


def test_rows_that_cannot_be_read_or_have_no_key_are_counted(
    spark: Any, lake: Lake, fake_api: FakeApi, tmp_path: Path
) -> None:
    fake_api.rejected_text = '"n": 3'
    (tmp_path / "bad.jsonl").write_text('{"n": 1}\n{"n": \nnot json\n{"m": 2}\n\n{"n": 3}\n{"n": 4}\n')
    result = load(spark, lake, str(tmp_path / "bad.jsonl"), LoadTarget(fake_api.url, "t", "import"), key="n")
    assert (result.rows, result.sent, result.refused, result.quarantined) == (3, 2, 1, 3)
    assert result.reasons == ("no",)


def test_rejection_of_the_whole_request_is_an_error(spark: Any, lake: Lake, fake_api: FakeApi, tmp_path: Path) -> None:
    fake_api.responses = [401] * 10
    with pytest.raises(Exception, match=f"{LoadRejected.__name__}: 401"):
        load(spark, lake, write_rows(tmp_path, 5), LoadTarget(fake_api.url, "secret-token", "import"), key="n")
    assert "secret-token" not in repr(LoadTarget(fake_api.url, "secret-token", "import"))


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz", "rows.parquet", "rows.jsonl"])
def test_datasets_are_read_by_their_format(spark: Any, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name.endswith(".parquet"):
        spark.createDataFrame(
            [("007", 'a "b"\nc', None), ("8", "é", "x")], "id string, text string, more string"
        ).coalesce(1).write.parquet(str(file))
    elif name.endswith(".jsonl"):
        file.write_text('{"id":"007","text":"a \\"b\\"\\nc","more":null}\n{"id":"8","text":"é","more":"x"}\n')
    else:
        sep = "\t" if "tsv" in name else ","
        text = f'id{sep}text{sep}more\n007{sep}"a ""b""\nc"{sep}\n8{sep}é{sep}x\nshort\n'
        file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    payloads = [row["payload"] for row in read_dataset(spark, str(file)).collect()]
    rows = {row["id"]: row for row in (json.loads(payload) for payload in payloads if payload)}
    assert payloads.count(None) == (1 if "csv" in name or "tsv" in name else 0), (
        "a row with a different number of fields is unreadable"
    )
    assert set(rows) == {"007", "8"}
    assert rows["007"] == {"id": "007", "text": 'a "b"\nc', "more": None}
    assert rows["8"] == {"id": "8", "text": "é", "more": "x"}


def test_equal_rows_without_a_key_column_get_distinct_keys_in_any_order(spark: Any, tmp_path: Path) -> None:
    def build_keys(texts: list[str]) -> list[str]:
        (tmp_path / "rows.jsonl").write_text("\n".join(texts))
        rows = add_idempotency_keys(read_dataset(spark, str(tmp_path / "rows.jsonl")), "import", "").collect()
        return sorted(row["idempotency_key"] for row in rows)

    rows = ['{"a":1}', '{"a":2}', '{"a":1}', '{"a":1}']
    assert build_keys(rows) == build_keys(rows[::-1])
    assert len(set(build_keys(rows))) == 4
    assert all(len(key) <= 255 and key.isprintable() for key in build_keys(rows))


@pytest.fixture
def api(audit: Audit, valkey: Any, tmp_path: Path) -> Iterator[str]:
    """The URL of the real API in a child process, on the tests' Valkey and database."""
    port, parts = free_port(), conninfo_to_dict(audit.dsn)
    url = f"postgresql://{parts.get('user', '')}@/{parts['dbname']}?host={parts['host']}"
    environment = {**os.environ, "DATABASE_URL": url, "CODEQ_WEB_PORT": str(port), "CODEQ_SERVE": "api"}
    log = tmp_path / "web.log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "codeq_site.web"], env=environment, stdout=file, stderr=file)
    try:

        def is_healthy() -> bool:
            assert process.poll() is None, log.read_text()
            import urllib.error
            import urllib.request

            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as response:
                    return bool(response.status == 200)
            except (urllib.error.URLError, ConnectionError):
                return False

        until(is_healthy, 30, every=0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)
        tenant_cache.stop()


@pytest.mark.spec("PIP-5", "Spark's executors load a dataset into a queue, each row once")
def test_dataset_becomes_tasks_of_its_tenant(api: str, spark: Any, lake: Lake, tmp_path: Path) -> None:
    tenants.create_tenant("acme")
    token = tenants.issue_token("acme", "producer")
    source = write_rows(tmp_path, 700)
    target = LoadTarget(api, token, "import", priority=3)
    result = load(spark, lake, source, target, key="n")
    assert (result.sent, result.refused) == (700, 0)
    tenant = tenant_cache.get_cached("acme") or pytest.fail("the tenant is not known")
    assert selectors.queue_stats(tenant, "import").run_sync().ready == 700
    # After the record of the load is deleted, all rows are sent again, and no task is created twice.
    for name in lake.store.list_names("_loads"):
        lake.store.delete(f"_loads/{name}")
    assert load(spark, lake, source, target, key="n").sent == 700
    assert selectors.queue_stats(tenant, "import").run_sync().ready == 700
    assert client().ping()
