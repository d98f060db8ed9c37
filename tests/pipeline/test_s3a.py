"""The lake in a bucket: the real jobs through Hadoop's own S3A, against a server that speaks S3 on the loopback.

S3A comes with none of codeQ's packages: `make test-s3a` fetches it, and names the jars in CODEQ_TEST_S3A_JARS.
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
from pipeline.spark.lake import PublishConflict, DamagedFile, Lake
from pipeline.spark.store import HadoopStore
from tests.pipeline.conftest import QUICK
from tests.pipeline.history import Audit, digests
from tests.pipeline.test_crash import MOMENTS, rows
from tests.pipeline.test_lake import one
from tests.queues.api.test_artifacts_s3 import BUCKET, S3

SECRET = "canary-of-the-secret-key"
FACTS = ("ingest", "attempts", "usage")
# What every release of S3A understands: an earlier one cannot read the defaults of a later Hadoop. Spark itself hands
# the keys of the environment to that provider.
PLAIN = {
    "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "threads.keepalivetime": "60",
    "multipart.purge.age": "86400",
    "connection.timeout": "200000",
    "connection.establish.timeout": "5000",
    "connection.ttl": "300000",
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    s3 = S3()
    yield s3
    s3.process.kill()
    s3.process.wait()


@pytest.fixture(scope="module")
def conf(server: S3) -> dict[str, str]:
    given = {"endpoint": server.url, "path.style.access": "true", "connection.ssl.enabled": "false", **PLAIN}
    jars = {"spark.jars": os.environ["CODEQ_TEST_S3A_JARS"]}
    return {**QUICK, **jars, **{f"spark.hadoop.fs.s3a.{key}": value for key, value in given.items()}}


@pytest.fixture(scope="module")
def spark(conf: dict[str, str]) -> Iterator[Any]:
    """The keys come by the environment, as they should."""
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY=SECRET, PYTHONWARNINGS="ignore")
    started = session.start("local[2]", name="s3a", conf=conf)
    yield started
    started.stop()


@pytest.fixture
def lake(spark: Any, server: S3) -> Iterator[Lake]:
    yield Lake(f"s3a://{BUCKET}/some/lake", spark)
    server.clear()


def objects(server: S3, text: str) -> list[str]:
    pages = server.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return [each["Key"] for page in pages for each in page.get("Contents", []) if text in each["Key"]]


def body(server: S3, name: str) -> bytes:
    content: bytes = server.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    return content


def test_a_bucket_is_a_store(lake: Lake, server: S3) -> None:
    store = lake.store
    assert store.read("a/b.json") is None
    assert store.put_new("a/b.json", b"\x00one\xff")
    assert not store.put_new("a/b.json", b"two")
    assert store.read("a/b.json") == b"\x00one\xff" == body(server, "some/lake/a/b.json")
    assert store.put_new("a/c.json", b"")
    assert store.list_names("a") == ["b.json", "c.json"]
    assert store.list_names("none") == []
    assert store.list_sizes("a") == {"a/b.json": 5, "a/c.json": 0}
    assert store.compute_checksums(["a/b.json", "a/c.json", "a/none"]) == {"a/b.json": "5-d2a6860d", "a/c.json": "0-00000000"}
    store.delete("a")
    assert store.list_names("a") == []
    assert store.list_sizes("a") == {}


def test_of_many_writers_at_once_one_creates_the_object(lake: Lake) -> None:
    assert isinstance(lake.store, HadoopStore)
    if not lake.store.is_conditional:
        pytest.skip("this S3A is of before Hadoop 3.4.2, which cannot")
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            won = list(pool.map(lambda i, n=number: lake.store.put_new(f"x/{n}", b"%d" % i), range(8)))
            assert won.count(True) == 1
            assert lake.store.read(f"x/{number}") == b"%d" % won.index(True)


def test_what_could_not_be_written_whole_is_not_there(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the stream would make an object of what it has."""
    store = lake.store
    assert isinstance(store, HadoopStore)
    real = store._create

    class Torn:
        def __init__(self, path: Any) -> None:
            self.stream = real(path)

        def write(self, data: bytearray) -> None:
            self.stream.write(data[: len(data) // 2])
            raise KeyboardInterrupt

        def close(self) -> None:
            self.stream.close()

    monkeypatch.setattr(store, "_create", Torn)
    with pytest.raises(KeyboardInterrupt):
        lake.commit(lake.root(), {"raw": one("x")})
    monkeypatch.undo()
    assert lake.root().number == 0
    lake.commit(lake.root(), {"raw": one("x")})
    assert lake.manifest("raw") == one("x")


def test_all_jobs_and_again_and_compacted(run: Any, lake: Lake, audit: Audit, tmp_path: Path) -> None:
    """The same content as on a disk, however many runs it took."""
    here = Lake(str(tmp_path / "lake"))
    for seed in range(1, 7):
        audit.add(rows(seed, 40))
        run("ingest", "attempts")
    pieces = max(len(part.files) for part in lake.manifest("raw").partitions.values())
    reports = run()
    run(lake=here)
    tables = ("attempts", "throughput", "latency", "failures", "usage", "capacity", "leases")
    assert reports["publish"].rows_out > 0
    assert digests(lake, *tables) == digests(here, *tables)
    assert {key: part.rows for key, part in lake.manifest("attempts").partitions.items()} == audit.totals()
    assert reports["compact"].partitions > 0
    assert max(len(part.files) for part in lake.manifest("raw").partitions.values()) <= pieces
    number = lake.root().number
    assert all(report.rows_out == 0 for report in run().values())
    assert lake.root().number == number
    base = lake.root()
    lake.commit(base, {"usage": lake.manifest("attempts")})
    with pytest.raises(PublishConflict):
        lake.commit(base, {"usage": lake.manifest("usage")})
    lake.vacuum()
    assert lake.manifest("raw").rows == 240


def test_a_file_in_which_a_byte_has_changed_is_an_error_that_names_it(run: Any, lake: Lake, audit: Audit, server: S3,
                                                                      spark: Any) -> None:  # fmt: skip
    audit.add(rows(1, 50))
    run("ingest", "attempts")
    victim = objects(server, "/attempts/")[0]
    whole = body(server, victim)
    server.client.put_object(Bucket=BUCKET, Key=victim, Body=whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(DamagedFile, match=victim.rpartition("/")[2]):
        run("usage")
    server.client.delete_object(Bucket=BUCKET, Key=victim)
    with pytest.raises(DamagedFile, match=victim.rpartition("/")[2]):
        run("usage")
    server.client.put_object(Bucket=BUCKET, Key=victim, Body=whole)
    assert run("usage")["usage"].rows_out > 0


@pytest.mark.timeout(900)
def test_a_killed_run_is_made_whole_and_readers_never_see_half(
    run: Any, lake: Lake, audit: Audit, conf: dict[str, str], server: S3, tmp_path: Path
) -> None:
    audit.add(rows(1))
    run(*FACTS)
    total = 200
    for seed, (moment, _, what) in enumerate(MOMENTS, 2):
        audit.add(rows(seed, 50))
        done, wrong, seen = threading.Event(), [], []

        def read(done: Any = done, wrong: list[Any] = wrong, seen: list[int] = seen, total: int = total) -> None:
            while not done.is_set():
                manifest = lake.manifest("attempts")
                files = lake.paths(manifest, manifest.partitions)
                bodies = (body(server, file.removeprefix(f"s3a://{BUCKET}/")) for file in files)
                count = sum(pq.read_table(io.BytesIO(each), columns=["id"]).num_rows for each in bodies)
                seen.append(count)
                if count != manifest.rows or count not in (total, total + 50):
                    wrong.append((count, manifest.rows))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            said = killed(lake, audit, conf, moment, what)
            run(*FACTS)
        finally:
            done.set()
            thread.join()
        assert seen
        assert wrong == []
        assert SECRET not in said
        total += 50
        assert lake.manifest("attempts").rows == total
    clean = Lake(str(tmp_path / "clean"))
    run(*FACTS, lake=clean)
    assert digests(lake, "attempts", "usage") == digests(clean, "attempts", "usage")


def killed(lake: Lake, audit: Audit, conf: dict[str, str], moment: str, what: str) -> str:
    """Run the jobs in a process of its own, and kill its JVM or all of it when it says this. Returns all it said."""
    command = [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--dsn-file", "-", "--lake", lake.url]
    command += [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    said = ""
    with subprocess.Popen(
        [*command, "run", *FACTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(audit.dsn)
        process.stdin.close()
        for line in process.stdout:
            said += line
            if line.startswith(moment):
                children = psutil.Process(process.pid).children(recursive=True)
                if what == "all":
                    process.kill()
                for child in children:
                    if what == "all" or "java" in child.name():
                        child.kill()
                break
        else:
            pytest.fail(f"the run never said {moment!r}: {said[-2000:]}")
        said += process.stdout.read()
    return said


def test_the_commands_read_a_lake_in_a_bucket(
    run: Any, lake: Lake, audit: Audit, conf: dict[str, str], tmp_path: Path
) -> None:
    audit.add(rows(1, 50))
    run("ingest", "attempts")
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in conf.items()))
    told = subprocess.run(
        [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--lake", lake.url, "files", "attempts"],
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    manifest = lake.manifest("attempts")
    assert sorted(told.stdout.split()) == sorted(lake.paths(manifest, manifest.partitions))
    assert SECRET not in told.stdout + told.stderr


def test_no_key_or_password_is_in_what_spark_writes_of_a_run(
    lake: Lake, audit: Audit, conf: dict[str, str], spark: Any, tmp_path: Path
) -> None:
    """The log of its events, from which the history server shows settings, plans and errors, and what it prints."""
    audit.add(rows(1, 20))
    password = "canary-of-the-password"
    (tmp_path / "dsn").write_text(f"{audit.dsn} password={password}")
    (tmp_path / "events").mkdir()
    more = {
        **conf,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (tmp_path / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }
    command = [sys.executable, "-m", "pipeline.spark", "--master", "local[2]", "--lake", lake.url]
    command += ["--dsn-file", str(tmp_path / "dsn")]
    command += [word for key, value in more.items() for word in ("--conf", f"{key}={value}")]
    told = subprocess.run([*command, "run", *FACTS], check=True, capture_output=True)
    written = [file.read_bytes() for file in (tmp_path / "events").rglob("*") if file.is_file()]
    assert any(b"SparkListenerSQLExecutionStart" in text for text in written)
    for text in (told.stdout, told.stderr, *written):
        assert SECRET.encode() not in text
        assert password.encode() not in text


def test_a_bucket_that_is_not_there_is_said_without_the_keys(spark: Any, audit: Audit) -> None:
    with pytest.raises(Exception, match="no-such-bucket") as error:
        list(jobs.run(jobs.JobContext(spark, Lake("s3a://no-such-bucket/lake", spark), audit.dsn), ["ingest"]))
    assert SECRET not in str(error.value)
