"""A lake in a bucket: the Spark jobs through Hadoop's S3A, against a local S3 server.

S3A is not a dependency of codeQ. `make test-s3a` downloads it, and sets CODEQ_TEST_S3A_JARS to the jars.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from pipeline.spark import jobs, session
from pipeline.spark.lake import DamagedFile, Lake, PublishConflict
from pipeline.spark.store import HadoopStore
from tests.pipeline.conftest import FAST_CONF
from tests.pipeline.history import Audit, build_attempts_around_dst, build_manifest, count_rows, read_digests
from tests.pipeline.kills import MOMENTS
from tests.s3_server import BUCKET, S3Server

SECRET = "canary-of-the-secret-key"
JOBS = ("ingest", "attempts", "usage")
# Values that every release of S3A supports: an older release cannot parse the defaults of a newer Hadoop. Spark passes
# the keys in the environment to this credentials provider.
PORTABLE_CONF = {
    "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "threads.keepalivetime": "60",
    "multipart.purge.age": "86400",
    "connection.timeout": "200000",
    "connection.establish.timeout": "5000",
    "connection.ttl": "300000",
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    s3 = S3Server()
    yield s3
    s3.process.kill()
    s3.process.wait()


@pytest.fixture(scope="module")
def conf(server: S3Server) -> dict[str, str]:
    settings = {"endpoint": server.url, "path.style.access": "true", "connection.ssl.enabled": "false", **PORTABLE_CONF}
    jars = {"spark.jars": os.environ["CODEQ_TEST_S3A_JARS"]}
    return {**FAST_CONF, **jars, **{f"spark.hadoop.fs.s3a.{key}": value for key, value in settings.items()}}


@pytest.fixture(scope="module")
def spark(conf: dict[str, str]) -> Iterator[Any]:
    """A session that gets its S3 keys from the environment, as recommended."""
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY=SECRET, PYTHONWARNINGS="ignore")
    started = session.start("local[2]", name="s3a", conf=conf)
    yield started
    started.stop()


@pytest.fixture
def lake(spark: Any, server: S3Server) -> Iterator[Lake]:
    yield Lake(f"s3a://{BUCKET}/some/lake", spark)
    server.clear()


def list_objects(server: S3Server, text: str) -> list[str]:
    pages = server.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return [item["Key"] for page in pages for item in page.get("Contents", []) if text in item["Key"]]


def read_object(server: S3Server, name: str) -> bytes:
    content: bytes = server.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    return content


def test_bucket_can_be_used_as_a_store(lake: Lake, server: S3Server) -> None:
    store = lake.store
    assert store.read("a/b.json") is None
    assert store.put_new("a/b.json", b"\x00one\xff")
    assert not store.put_new("a/b.json", b"two")
    assert store.read("a/b.json") == b"\x00one\xff" == read_object(server, "some/lake/a/b.json")
    assert store.put_new("a/c.json", b"")
    assert store.list_names("a") == ["b.json", "c.json"]
    assert store.list_names("none") == []
    assert store.list_sizes("a") == {"a/b.json": 5, "a/c.json": 0}
    assert store.compute_checksums(["a/b.json", "a/c.json", "a/none"]) == {
        "a/b.json": "5-d2a6860d",
        "a/c.json": "0-00000000",
    }
    store.delete("a")
    assert store.list_names("a") == []
    assert store.list_sizes("a") == {}


def test_only_one_of_many_writers_creates_an_object(lake: Lake) -> None:
    assert isinstance(lake.store, HadoopStore)
    if not lake.store.is_conditional:
        pytest.skip("conditional creation needs the S3A of Hadoop 3.4.2 or later")
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            results = list(pool.map(lambda i, n=number: lake.store.put_new(f"x/{n}", b"%d" % i), range(8)))
            assert results.count(True) == 1
            assert lake.store.read(f"x/{number}") == b"%d" % results.index(True)


def test_partially_written_object_does_not_appear(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the stream would create an object of the data written so far."""
    store = lake.store
    assert isinstance(store, HadoopStore)
    create = store._create

    class FailingStream:
        def __init__(self, path: Any) -> None:
            self.stream = create(path)

        def write(self, data: bytearray) -> None:
            self.stream.write(data[: len(data) // 2])
            raise KeyboardInterrupt

        def close(self) -> None:
            self.stream.close()

    monkeypatch.setattr(store, "_create", FailingStream)
    with pytest.raises(KeyboardInterrupt):
        lake.commit(lake.root(), {"raw": build_manifest("x")})
    monkeypatch.undo()
    assert lake.root().number == 0
    lake.commit(lake.root(), {"raw": build_manifest("x")})
    assert lake.manifest("raw") == build_manifest("x")


def test_all_jobs_repeated_and_compacted(run: Any, lake: Lake, audit: Audit, tmp_path: Path) -> None:
    """Several runs in a bucket give the same content as one run on a local disk."""
    local_lake = Lake(str(tmp_path / "lake"))
    for seed in range(1, 7):
        audit.add(build_attempts_around_dst(seed, 40))
        run("ingest", "attempts")
    file_count = max(len(part.files) for part in lake.manifest("raw").partitions.values())
    reports = run()
    run(lake=local_lake)
    tables = ("attempts", "throughput", "latency", "failures", "usage", "capacity", "leases")
    assert reports["publish"].rows_out > 0
    assert read_digests(lake, *tables) == read_digests(local_lake, *tables)
    assert count_rows(lake) == audit.count_per_partition()
    assert reports["compact"].partitions > 0
    assert max(len(part.files) for part in lake.manifest("raw").partitions.values()) <= file_count
    number = lake.root().number
    assert all(report.rows_out == 0 for report in run().values())
    assert lake.root().number == number
    base = lake.root()
    lake.commit(base, {"usage": lake.manifest("attempts")})
    with pytest.raises(PublishConflict):
        lake.commit(base, {"usage": lake.manifest("usage")})
    lake.vacuum()
    assert lake.manifest("raw").rows == 240


def test_changed_byte_in_an_object_is_an_error_that_names_it(run: Any, lake: Lake, audit: Audit, server: S3Server,
                                                                      spark: Any) -> None:  # fmt: skip
    audit.add(build_attempts_around_dst(1, 50))
    run("ingest", "attempts")
    victim = list_objects(server, "/attempts/")[0]
    whole = read_object(server, victim)
    server.client.put_object(Bucket=BUCKET, Key=victim, Body=whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(DamagedFile, match=victim.rpartition("/")[2]):
        run("usage")
    server.client.delete_object(Bucket=BUCKET, Key=victim)
    with pytest.raises(DamagedFile, match=victim.rpartition("/")[2]):
        run("usage")
    server.client.put_object(Bucket=BUCKET, Key=victim, Body=whole)
    assert run("usage")["usage"].rows_out > 0


@pytest.mark.timeout(900)
def test_next_run_completes_a_killed_run_and_readers_never_see_partial_data(
    run: Any, lake: Lake, audit: Audit, conf: dict[str, str], server: S3Server, tmp_path: Path
) -> None:
    audit.add(build_attempts_around_dst(1))
    run(*JOBS)
    total = 200
    for seed, (message, _, target) in enumerate(MOMENTS, 2):
        audit.add(build_attempts_around_dst(seed, 50))
        done, errors, row_counts = threading.Event(), [], []

        def read(
            done: Any = done, errors: list[Any] = errors, row_counts: list[int] = row_counts, total: int = total
        ) -> None:
            while not done.is_set():
                manifest = lake.manifest("attempts")
                files = lake.paths(manifest, manifest.partitions)
                contents = (read_object(server, file.removeprefix(f"s3a://{BUCKET}/")) for file in files)
                count = sum(pq.read_table(io.BytesIO(content), columns=["id"]).num_rows for content in contents)
                row_counts.append(count)
                if count != manifest.rows or count not in (total, total + 50):
                    errors.append((count, manifest.rows))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            output = run_and_kill(lake, audit, conf, message, target)
            run(*JOBS)
        finally:
            done.set()
            thread.join()
        assert row_counts
        assert errors == []
        assert SECRET not in output
        total += 50
        assert lake.manifest("attempts").rows == total
    clean = Lake(str(tmp_path / "clean"))
    run(*JOBS, lake=clean)
    assert read_digests(lake, "attempts", "usage") == read_digests(clean, "attempts", "usage")


def run_and_kill(lake: Lake, audit: Audit, conf: dict[str, str], message: str, target: str) -> str:
    """Run the jobs in a child process, and kill it or only its JVM after this message."""
    command = [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--dsn-file", "-", "--lake", lake.url]
    command += [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    output = ""
    with subprocess.Popen(
        [*command, "run", *JOBS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(audit.dsn)
        process.stdin.close()
        for line in process.stdout:
            output += line
            if line.startswith(message):
                children = psutil.Process(process.pid).children(recursive=True)
                if target == "all":
                    process.kill()
                for child in children:
                    if target == "all" or "java" in child.name():
                        child.kill()
                break
        else:
            pytest.fail(f"the run never printed {message!r}: {output[-2000:]}")
        output += process.stdout.read()
    return output


def test_command_reads_a_lake_in_a_bucket(
    run: Any, lake: Lake, audit: Audit, conf: dict[str, str], tmp_path: Path
) -> None:
    audit.add(build_attempts_around_dst(1, 50))
    run("ingest", "attempts")
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in conf.items()))
    process = subprocess.run(
        [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--lake", lake.url, "files", "attempts"],
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    manifest = lake.manifest("attempts")
    assert sorted(process.stdout.split()) == sorted(lake.paths(manifest, manifest.partitions))
    assert SECRET not in process.stdout + process.stderr


def test_spark_logs_contain_no_key_or_password(
    lake: Lake, audit: Audit, conf: dict[str, str], spark: Any, tmp_path: Path
) -> None:
    """Check the output and the event log, which contains settings, plans and errors."""
    audit.add(build_attempts_around_dst(1, 20))
    password = "canary-of-the-password"
    (tmp_path / "dsn").write_text(f"{audit.dsn} password={password}")
    (tmp_path / "events").mkdir()
    options = {
        **conf,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (tmp_path / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }
    command = [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--lake", lake.url]
    command += ["--dsn-file", str(tmp_path / "dsn")]
    command += [word for key, value in options.items() for word in ("--conf", f"{key}={value}")]
    process = subprocess.run([*command, "run", *JOBS], check=True, capture_output=True)
    event_logs = [file.read_bytes() for file in (tmp_path / "events").rglob("*") if file.is_file()]
    assert any(b"SparkListenerSQLExecutionStart" in text for text in event_logs)
    for text in (process.stdout, process.stderr, *event_logs):
        assert SECRET.encode() not in text
        assert password.encode() not in text


def test_error_for_a_missing_bucket_contains_no_key(spark: Any, audit: Audit) -> None:
    with pytest.raises(Exception, match="no-such-bucket") as error:
        list(jobs.run(jobs.JobContext(spark, Lake("s3a://no-such-bucket/lake", spark), audit.dsn), ["ingest"]))
    assert SECRET not in str(error.value)
