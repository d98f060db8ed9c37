"""Damaged files, files with other columns, and lakes on other file systems.

No file is skipped silently.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from pipeline.spark import jobs, schemas, sinks
from pipeline.spark.lake import DamagedFile, Lake, files
from pipeline.spark.store import HadoopStore
from pipeline.spark.synthetic import HistoryShape, generate_history
from tests.pipeline.history import DAY, Audit, build_mixed_attempts, count_rows, read_digests


@pytest.mark.spec("PIP-2", "A file that cannot be read is excluded and listed, or the job fails with its name")
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "flipped without checksum file"])
def test_broken_file_is_excluded_and_the_others_are_read(
    run: Any, spark: Any, lake: Lake, tmp_path: Path, damage: str
) -> None:
    shape = HistoryShape(2000, days=1, tenants=1, tenant_ids=("acme0001",), first_day=DAY.date())
    folder = tmp_path / "old"
    generate_history(spark, shape, parallelism=2).drop("arrived_at").write.parquet(str(folder))
    good, bad = sorted(folder.glob("part-*.parquet"))
    rows = spark.read.parquet(str(good)).count()
    damage_file(bad, damage)
    reports = run("ingest", "attempts", files=str(folder))
    assert reports["ingest"].rows_out == reports["attempts"].rows_out == rows
    assert [note.split(": ")[0].endswith(bad.name) for note in reports["ingest"].notes] == [True]


def damage_file(file: Path, damage: str) -> None:
    data = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :])
    if "flipped" not in damage or "without" in damage:
        (file.parent / f".{file.name}.crc").unlink()


def choose_offsets(size: int) -> list[int]:
    """Choose the bytes of a Parquet file to change: both ends and a sample of the rest."""
    return sorted({0, 3, 4, size - 1, size - 5, size - 8, size - 9, *range(7, size, max(size // 60, 1))})


@pytest.mark.spec("PIP-2", "A changed byte in a file of the lake is an error that names the file")
def test_any_changed_byte_of_the_lake_is_detected(run: Any, lake: Lake, audit: Audit) -> None:
    audit.add(build_mixed_attempts(30, random.Random(6)))
    run("ingest", "attempts", "usage")
    manifest = lake.manifest("attempts")
    (path, *_) = lake.paths(manifest, manifest.partitions)
    file = Path(path.removeprefix("file://"))
    (file.parent / f".{file.name}.crc").unlink()
    whole = file.read_bytes()
    undetected_by_parquet = 0
    for offset in choose_offsets(len(whole)):
        file.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x01]) + whole[offset + 1 :])
        with pytest.raises(DamagedFile, match=file.name):
            lake.verify(manifest, manifest.partitions)
        with contextlib.suppress(Exception):
            pq.read_table(file, partitioning=None)
            undetected_by_parquet += 1
    # Parquet alone misses some of the changes, which is why the lake needs checksums.
    assert undetected_by_parquet > 0
    for torn in (whole[:-1], whole + b"x", b""):
        file.write_bytes(torn)
        with pytest.raises(DamagedFile, match=file.name):
            files(lake.url, "attempts", checked=True)
    file.unlink()
    with pytest.raises(DamagedFile, match=file.name):
        files(lake.url, "attempts", checked=True)
    file.write_bytes(whole)
    assert path in files(lake.url, "attempts", checked=True)


@pytest.mark.parametrize(("table", "reader"), [("raw", "attempts"), ("attempts", "usage"), ("usage", "publish")])
def test_damaged_lake_is_an_error_and_is_repaired_from_the_audit(
    run: Any, lake: Lake, audit: Audit, table: str, reader: str
) -> None:
    audit.add(build_mixed_attempts(50, random.Random(6)))
    names = jobs.select_jobs(["ingest", "attempts", "usage", "publish"])
    run(*names[: names.index(reader)])
    manifest = lake.manifest(table)
    (path, *_) = lake.paths(manifest, manifest.partitions)
    file = Path(path.removeprefix("file://"))
    data = file.read_bytes()
    # Change a byte of the footer, which Parquet's checksums do not cover.
    file.write_bytes(data[:-30] + bytes([data[-30] ^ 0x40]) + data[-29:])
    (file.parent / f".{file.name}.crc").unlink()
    number = lake.root().number
    with pytest.raises(DamagedFile, match=file.name):
        run(reader)
    assert lake.root().number == number
    run("ingest", "attempts", "usage", "publish", since=DAY.date())
    assert count_rows(lake) == audit.count_per_partition()
    assert audit.query("SELECT sum(attempts) FROM pipeline_usage")[0][0] == 50


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "without an optional column": (lambda rows: rows.drop("error"), ""),
    "narrower": (lambda rows: rows.withColumn("payload_bytes", F.col("payload_bytes").cast("int")), ""),
    "without a column": (lambda rows: rows.drop("outcome"), "outcome is missing"),
    "renamed": (lambda rows: rows.withColumnRenamed("worker", "done_by"), "done_by is unknown"),
    "with one more": (lambda rows: rows.withColumn("surprise", F.lit(1)), "surprise is unknown"),
    "of another type": (lambda rows: rows.withColumn("number", F.col("number").cast("string")), "number is string"),
}


@pytest.mark.spec("PIP-2", "A changed column is rejected by name, a missing optional column is read as null")
def test_files_are_read_or_rejected_by_their_columns(run: Any, spark: Any, lake: Lake, tmp_path: Path) -> None:
    expected = 0
    for seed, (name, (change, reason)) in enumerate(CHANGES.items()):
        shape = HistoryShape(30, days=1, tenants=1, tenant_ids=("acme0001",), first_day=DAY.date(), seed=seed)
        rows = generate_history(spark, shape, parallelism=1).drop("arrived_at")
        change(rows).write.parquet(str(tmp_path / "old" / name.replace(" ", "-")))
        expected += 0 if reason else rows.count()
    reports = run("ingest", "attempts", files=str(tmp_path / "old"))
    note_by_file = {note.split("/old/")[1].split("/")[0]: note for note in reports["ingest"].notes}
    reasons = {name.replace(" ", "-"): reason for name, (_, reason) in CHANGES.items() if reason}
    assert note_by_file.keys() == reasons.keys()
    assert all(reason in note_by_file[name] for name, reason in reasons.items()), note_by_file
    assert reports["ingest"].quarantined == 0
    assert reports["attempts"].rows_out == expected
    manifest = lake.manifest("attempts")
    facts = sinks.load(spark, lake, schemas.ATTEMPTS, manifest, manifest.partitions)
    required = [column.name for column in schemas.ATTEMPTS.columns if not column.optional]
    assert facts.where(" OR ".join(f"{name} IS NULL" for name in required)).count() == 0


@pytest.fixture(params=["renamed into place", "created in place, as on an object store"])
def hadoop_lake(request: pytest.FixtureRequest, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake under a URL with a scheme and a host, which only Hadoop can open."""
    host = f"bucket-{'object' if 'object' in request.param else 'files'}"
    (tmp_path / "mounted").mkdir()
    link = f"fs.viewfs.mounttable.{host}.link./history"
    spark.sparkContext._jsc.hadoopConfiguration().set(link, (tmp_path / "mounted").as_uri())
    if "object" in request.param:
        monkeypatch.setattr(HadoopStore, "OBJECTS", (*HadoopStore.OBJECTS, "viewfs"))
    return Lake(f"viewfs://{host}/history/codeq", spark)


@pytest.mark.spec("PIP-3", "The lake can be at any URL that Hadoop's file systems support")
def test_lake_by_url_has_the_same_content_as_a_local_lake(
    run: Any, spark: Any, lake: Lake, hadoop_lake: Lake, audit: Audit, tmp_path: Path
) -> None:
    audit.add(build_mixed_attempts(80, random.Random(7)))
    for target in (hadoop_lake, lake):
        run("ingest", "attempts", "usage", lake=target)
    assert (tmp_path / "mounted" / "codeq" / "_log").is_dir()
    assert read_digests(hadoop_lake, "attempts", "usage") == read_digests(lake, "attempts", "usage")
    urls = files(hadoop_lake.url, "attempts", spark=spark, checked=True)
    assert urls
    assert all(url.startswith(f"{hadoop_lake.url}/attempts/run=") for url in urls)
    assert spark.read.parquet(*urls).count() == 80
    manifest = hadoop_lake.manifest("usage")
    day, part = next(iter(manifest.partitions.items()))
    damage_file(tmp_path / "mounted" / "codeq" / part.files[0], "flipped without checksum file")
    with pytest.raises(DamagedFile, match=part.files[0]):
        hadoop_lake.verify(manifest, [day])
