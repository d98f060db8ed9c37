"""The lake's pointer: commits are atomic and serialised, and files in use are kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.spark.lake import DamagedFile, Lake, Manifest, Partition, PublishConflict, files
from pipeline.spark.store import HadoopStore, LocalStore, Store, open_store
from tests.pipeline.history import build_manifest

OLD = "20200101T000000-0a0b0c0d"


@pytest.fixture(params=["local", "hadoop"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(str(tmp_path / "store"))
    return HadoopStore((tmp_path / "store").as_uri(), request.getfixturevalue("spark"))


def test_store_creates_a_file_once(store: Store) -> None:
    assert store.read("a/b.json") is None
    assert store.put_new("a/b.json", b"\x00one\xff")
    assert not store.put_new("a/b.json", b"two")
    assert store.read("a/b.json") == b"\x00one\xff"
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


def test_only_one_of_many_writers_creates_a_file(tmp_path: Path) -> None:
    stores = [LocalStore(str(tmp_path)) for _ in range(16)]
    for number in range(20):
        start = threading.Barrier(16)

        def create(i: int, number: int = number, start: threading.Barrier = start) -> bool:
            start.wait()
            return stores[i].put_new(f"x/{number}", b"%d" % i)

        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(create, range(16)))
        assert results.count(True) == 1
        assert stores[0].read(f"x/{number}") == b"%d" % results.index(True)


def test_remote_store_needs_a_session() -> None:
    with pytest.raises(ValueError, match="s3a"):
        open_store("s3a://bucket/lake")


class RacingFileSystem:
    """A file system on which the existence check misses a file of another writer."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def exists(self, path: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


@pytest.mark.parametrize("is_object", [True, False], ids=["created-in-place", "renamed"])
def test_writer_that_loses_the_race_gets_false(spark: Any, tmp_path: Path, is_object: bool) -> None:
    store = HadoopStore((tmp_path / "store").as_uri(), spark)
    assert store.put_new("a/b.json", b"one")
    store._fs, store._is_object = RacingFileSystem(store._fs), is_object
    assert not store.put_new("a/b.json", b"two")
    assert store.read("a/b.json") == b"one"
    assert LocalStore(str(tmp_path / "store")).list_names("a") == ["b.json"]


def test_conditional_file_system_must_create_without_overwriting(spark: Any, tmp_path: Path) -> None:
    """The option is mandatory: a file system that does not support it raises an error.

    The local file system does not support it. S3A does.
    """
    store = HadoopStore((tmp_path / "store").as_uri(), spark)
    assert not store.is_conditional
    store.is_conditional = True
    with pytest.raises(Exception, match=HadoopStore.CONDITIONAL):
        store.put_new("a/b.json", b"one")
    assert store.read("a/b.json") is None


def test_stream_is_not_closed_after_a_failed_write(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the stream would create the object."""
    closed = []

    class FailingStream:
        def write(self, data: bytearray) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(True)

    store = HadoopStore((tmp_path / "store").as_uri(), spark)
    monkeypatch.setattr(store, "_create", lambda path: FailingStream())
    with pytest.raises(KeyboardInterrupt):
        store.put_new("_log/1.json", b"pointer")
    assert not closed


def test_store_without_conditional_create_logs_a_warning(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HadoopStore, "OBJECTS", ("file",))
    HadoopStore(tmp_path.as_uri(), spark)
    assert "Run only one pipeline at a time" in caplog.text


def test_url_with_a_secret_is_rejected_without_repeating_the_secret() -> None:
    with pytest.raises(ValueError, match="s3a") as error:
        open_store("s3a://key:canary@bucket/lake")
    assert "canary" not in str(error.value)


def test_committed_tables_are_read(lake: Lake) -> None:
    assert lake.root().number == 0
    assert lake.manifest("raw") == Manifest()
    root = lake.commit(lake.root(), {"raw": build_manifest("raw/run=x/date=2026-03-10/tenant=a/p.parquet", 7)})
    assert (root.number, lake.manifest("raw").rows) == (1, 7)
    assert files(lake.url, "raw") == [f"{lake.url}/raw/run=x/date=2026-03-10/tenant=a/p.parquet"]
    assert files(lake.url, "raw", tenant="b") == []


def test_tables_of_one_commit_appear_together(lake: Lake) -> None:
    lake.commit(lake.root(), {"a": build_manifest("a0"), "b": build_manifest("b0")})
    observed: set[tuple[str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            root = lake.root()
            first, second = (lake.manifest(table, root).partitions["2026-03-10/a"].files[0] for table in "ab")
            observed.add((first[1:], second[1:]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 60):
        lake.commit(lake.root(), {"a": build_manifest(f"a{number}"), "b": build_manifest(f"b{number}")})
    done.set()
    watcher.join()
    assert all(first == second for first, second in observed)


def test_commit_fails_if_a_table_has_changed(lake: Lake) -> None:
    base = lake.root()
    lake.commit(base, {"raw": build_manifest("x")})
    with pytest.raises(PublishConflict, match="raw"):
        lake.commit(base, {"raw": build_manifest("y")})
    with pytest.raises(PublishConflict, match="raw"):
        lake.commit(base, {"attempts": build_manifest("y")}, read=["raw"])
    lake.commit(base, {"usage": build_manifest("z")}, read=["attempts"])
    assert lake.manifest("raw") == build_manifest("x")
    assert lake.manifest("usage") == build_manifest("z")


def test_no_commit_of_concurrent_writers_is_lost(lake: Lake) -> None:
    def add(name: str) -> None:
        for _ in range(10):
            while True:
                root = lake.root()
                before = lake.manifest("raw", root)
                try:
                    lake.commit(
                        root,
                        {
                            "raw": Manifest(
                                {name: Partition(("f",), 1), **before.partitions},
                                {},
                                {**before.state, name: before.state.get(name, 0) + 1},
                            ),
                            name: build_manifest(name),
                        },
                    )
                except PublishConflict:
                    continue
                break

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, [f"w{i}" for i in range(6)]))
    assert lake.root().number == 60
    assert dict(lake.manifest("raw").state) == {f"w{i}": 10 for i in range(6)}


def test_vacuum_removes_only_old_unreferenced_files(tmp_path: Path, lake: Lake) -> None:
    folder = Path(lake.url.removeprefix("file://"))

    def write_data(run: str) -> str:
        file = folder / "raw" / f"run={run}" / "date=2026-03-10" / "p.parquet"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"rows")
        return file.relative_to(folder).as_posix()

    kept, orphan, staged = (write_data(run) for run in (OLD, "20200101T000001-00000000", "29990101T000000-00000000"))
    lake.commit(lake.root(), {"raw": build_manifest(kept)})
    assert lake.vacuum() == 1
    assert (folder / kept).exists()
    assert (folder / staged).exists()
    assert not (folder / orphan).exists()


def test_vacuum_keeps_the_files_of_the_last_roots(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        lake.commit(
            lake.root(), {"raw": build_manifest(f"raw/run=20200101T0000{number:02}-00000000/date=2026-03-10/p")}
        )
    lake.vacuum(timedelta(days=-1))
    assert len(lake.store.list_names("_log")) == 20
    assert len(lake.store.list_names("_manifests")) == 20
    assert lake.root().number == 30
    assert lake.manifest("raw").rows == 1


def test_lake_is_the_same_with_and_without_spark(lake: Lake, spark: Any) -> None:
    lake.commit(lake.root(), {"raw": build_manifest("x", 3)})
    spark_lake = Lake(lake.url, store=HadoopStore(lake.url, spark))
    assert spark_lake.root() == lake.root()
    assert spark_lake.manifest("raw") == lake.manifest("raw")
    spark_lake.commit(spark_lake.root(), {"raw": build_manifest("y", 4)})
    assert lake.manifest("raw").rows == 4


def test_vacuum_removes_old_loads(lake: Lake) -> None:
    for name, begun in (("old", "20200101T000000-00000000"), ("new", "29990101T000000-00000000")):
        lake.store.put_new(f"_loads/{name}/begun", begun.encode())
        lake.store.put_new(f"_loads/{name}/rows/part.parquet", b"payloads")
    assert lake.vacuum() == 1
    assert lake.store.list_names("_loads") == ["new"]


def test_changed_byte_in_a_pointer_or_manifest_is_an_error_that_names_the_file(lake: Lake) -> None:
    lake.commit(lake.root(), {"raw": build_manifest("raw/run=x/date=2026-03-10/p", 7), "usage": build_manifest("u")})
    lake.commit(lake.root(), {"usage": build_manifest("v")})
    folder = Path(lake.url.removeprefix("file://"))
    pointer = max((folder / "_log").iterdir())
    manifest = folder / lake.root().tables["raw"]
    for file in (pointer, manifest):
        whole = file.read_bytes()
        for offset in range(len(whole)):
            file.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x01]) + whole[offset + 1 :])
            with pytest.raises(DamagedFile, match=file.name):
                lake.manifest("raw")
        file.write_bytes(whole)
    assert lake.manifest("raw").rows == 7


def test_lake_of_an_earlier_release_is_read(lake: Lake) -> None:
    """Earlier releases wrote no checksums."""
    lake.store.put_new("_manifests/raw-1.json", b'{"partitions":{"2026-03-10/a":{"digest":"","files":["f"],"rows":3}},'
                       b'"sources":{},"state":{}}')  # fmt: skip
    lake.store.put_new("_log/000000000001.json", b'{"number": 1, "tables": {"raw": "_manifests/raw-1.json"}}')
    manifest = lake.manifest("raw")
    assert manifest.rows == 3
    lake.verify(manifest, manifest.partitions)
    lake.commit(lake.root(), {"usage": build_manifest("u")})
    assert lake.manifest("raw").rows == 3
