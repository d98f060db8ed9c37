"""The lake's pointer: whole or not at all, one writer after the other, nothing removed that somebody may still read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.spark.lake import PublishConflict, DamagedFile, Lake, Manifest, Partition, files
from pipeline.spark.store import HadoopStore, LocalStore, Store, open_store

OLD = "20200101T000000-0a0b0c0d"


def one(file: str, rows: int = 1) -> Manifest:
    return Manifest({"2026-03-10/a": Partition((file,), rows)})


@pytest.fixture(params=["local", "hadoop"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(str(tmp_path / "store"))
    return HadoopStore((tmp_path / "store").as_uri(), request.getfixturevalue("spark"))


def test_a_store_creates_a_file_once(store: Store) -> None:
    assert store.read("a/b.json") is None
    assert store.put_new("a/b.json", b"\x00one\xff")
    assert not store.put_new("a/b.json", b"two")
    assert store.read("a/b.json") == b"\x00one\xff"
    assert store.put_new("a/c.json", b"")
    assert store.list_names("a") == ["b.json", "c.json"]
    assert store.list_names("none") == []
    assert store.list_sizes("a") == {"a/b.json": 5, "a/c.json": 0}
    assert store.compute_checksums(["a/b.json", "a/c.json", "a/none"]) == {"a/b.json": "5-d2a6860d", "a/c.json": "0-00000000"}
    store.delete("a")
    assert store.list_names("a") == []
    assert store.list_sizes("a") == {}


def test_of_many_creators_of_a_file_one_succeeds(tmp_path: Path) -> None:
    stores = [LocalStore(str(tmp_path)) for _ in range(16)]
    for number in range(20):
        start = threading.Barrier(16)

        def create(i: int, number: int = number, start: threading.Barrier = start) -> bool:
            start.wait()
            return stores[i].put_new(f"x/{number}", b"%d" % i)

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(create, range(16)))
        assert won.count(True) == 1
        assert stores[0].read(f"x/{number}") == b"%d" % won.index(True)


def test_a_store_other_than_local_needs_a_session() -> None:
    with pytest.raises(ValueError, match="s3a"):
        open_store("s3a://bucket/lake")


class Blind:
    """A file system that another writer reaches between the look and the writing."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def exists(self, path: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


@pytest.mark.parametrize("is_object", [True, False], ids=["created-in-place", "renamed"])
def test_who_is_second_at_the_end_of_the_writing_is_told_so(spark: Any, tmp_path: Path, is_object: bool) -> None:
    store = HadoopStore((tmp_path / "store").as_uri(), spark)
    assert store.put_new("a/b.json", b"one")
    store._fs, store._is_object = Blind(store._fs), is_object
    assert not store.put_new("a/b.json", b"two")
    assert store.read("a/b.json") == b"one"
    assert LocalStore(str(tmp_path / "store")).list_names("a") == ["b.json"]


def test_a_file_system_that_can_is_made_to_create_without_overwriting(spark: Any, tmp_path: Path) -> None:
    """Asked as something it must do: this machine's, which cannot, refuses, and S3A would send the condition."""
    store = HadoopStore((tmp_path / "store").as_uri(), spark)
    assert not store.is_conditional
    store.is_conditional = True
    with pytest.raises(Exception, match=HadoopStore.CONDITIONAL):
        store.put_new("a/b.json", b"one")
    assert store.read("a/b.json") is None


def test_an_object_that_could_not_be_written_whole_is_not_closed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing its stream is what makes it an object."""
    closed = []

    class Torn:
        def write(self, data: bytearray) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(True)

    store = HadoopStore((tmp_path / "store").as_uri(), spark)
    monkeypatch.setattr(store, "_create", lambda path: Torn())
    with pytest.raises(KeyboardInterrupt):
        store.put_new("_log/1.json", b"pointer")
    assert not closed


def test_a_store_that_may_lose_one_of_two_runs_says_so(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HadoopStore, "OBJECTS", ("file",))
    HadoopStore(tmp_path.as_uri(), spark)
    assert "let one run at a time write" in caplog.text


def test_a_lake_with_a_secret_in_its_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="s3a") as error:
        open_store("s3a://key:canary@bucket/lake")
    assert "canary" not in str(error.value)


def test_what_was_committed_is_what_is_read(lake: Lake) -> None:
    assert lake.root().number == 0
    assert lake.manifest("raw") == Manifest()
    root = lake.commit(lake.root(), {"raw": one("raw/run=x/date=2026-03-10/tenant=a/p.parquet", 7)})
    assert (root.number, lake.manifest("raw").rows) == (1, 7)
    assert files(lake.url, "raw") == [f"{lake.url}/raw/run=x/date=2026-03-10/tenant=a/p.parquet"]
    assert files(lake.url, "raw", tenant="b") == []


def test_tables_of_one_commit_appear_together(lake: Lake) -> None:
    lake.commit(lake.root(), {"a": one("a0"), "b": one("b0")})
    seen: set[tuple[str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            root = lake.root()
            first, second = (lake.manifest(table, root).partitions["2026-03-10/a"].files[0] for table in "ab")
            seen.add((first[1:], second[1:]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 60):
        lake.commit(lake.root(), {"a": one(f"a{number}"), "b": one(f"b{number}")})
    done.set()
    watcher.join()
    assert all(first == second for first, second in seen)


def test_a_commit_on_moved_ground_is_refused(lake: Lake) -> None:
    base = lake.root()
    lake.commit(base, {"raw": one("x")})
    with pytest.raises(PublishConflict, match="raw"):
        lake.commit(base, {"raw": one("y")})
    with pytest.raises(PublishConflict, match="raw"):
        lake.commit(base, {"attempts": one("y")}, read=["raw"])
    lake.commit(base, {"usage": one("z")}, read=["attempts"])
    assert lake.manifest("raw") == one("x")
    assert lake.manifest("usage") == one("z")


def test_no_commit_of_many_writers_is_lost(lake: Lake) -> None:
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
                            name: one(name),
                        },
                    )
                except PublishConflict:
                    continue
                break

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, [f"w{i}" for i in range(6)]))
    assert lake.root().number == 60
    assert dict(lake.manifest("raw").state) == {f"w{i}": 10 for i in range(6)}


def test_vacuum_takes_what_nobody_refers_to_and_nothing_else(tmp_path: Path, lake: Lake) -> None:
    folder = Path(lake.url.removeprefix("file://"))

    def data(run: str) -> str:
        file = folder / "raw" / f"run={run}" / "date=2026-03-10" / "p.parquet"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"rows")
        return file.relative_to(folder).as_posix()

    kept, orphan, staged = data(OLD), data("20200101T000001-00000000"), data("29990101T000000-00000000")
    lake.commit(lake.root(), {"raw": one(kept)})
    assert lake.vacuum() == 1
    assert (folder / kept).exists()
    assert (folder / staged).exists()
    assert not (folder / orphan).exists()


def test_vacuum_keeps_what_the_last_roots_refer_to(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        lake.commit(lake.root(), {"raw": one(f"raw/run=20200101T0000{number:02}-00000000/date=2026-03-10/p")})
    lake.vacuum(timedelta(days=-1))
    assert len(lake.store.list_names("_log")) == 20
    assert len(lake.store.list_names("_manifests")) == 20
    assert lake.root().number == 30
    assert lake.manifest("raw").rows == 1


def test_a_lake_has_one_meaning_through_spark_and_without(lake: Lake, spark: Any) -> None:
    lake.commit(lake.root(), {"raw": one("x", 3)})
    through = Lake(lake.url, store=HadoopStore(lake.url, spark))
    assert through.root() == lake.root()
    assert through.manifest("raw") == lake.manifest("raw")
    through.commit(through.root(), {"raw": one("y", 4)})
    assert lake.manifest("raw").rows == 4


def test_vacuum_forgets_loads_that_nobody_resumes(lake: Lake) -> None:
    for name, begun in (("old", "20200101T000000-00000000"), ("new", "29990101T000000-00000000")):
        lake.store.put_new(f"_loads/{name}/begun", begun.encode())
        lake.store.put_new(f"_loads/{name}/rows/part.parquet", b"payloads")
    assert lake.vacuum() == 1
    assert lake.store.list_names("_loads") == ["new"]


def test_a_pointer_or_manifest_in_which_a_byte_has_changed_is_an_error_that_names_it(lake: Lake) -> None:
    lake.commit(lake.root(), {"raw": one("raw/run=x/date=2026-03-10/p", 7), "usage": one("u")})
    lake.commit(lake.root(), {"usage": one("v")})
    folder = Path(lake.url.removeprefix("file://"))
    pointer = max((folder / "_log").iterdir())
    manifest = folder / lake.root().tables["raw"]
    for file in (pointer, manifest):
        whole = file.read_bytes()
        for spot in range(len(whole)):
            file.write_bytes(whole[:spot] + bytes([whole[spot] ^ 0x01]) + whole[spot + 1 :])
            with pytest.raises(DamagedFile, match=file.name):
                lake.manifest("raw")
        file.write_bytes(whole)
    assert lake.manifest("raw").rows == 7


def test_a_lake_of_an_earlier_release_is_read(lake: Lake) -> None:
    """One without checksums."""
    lake.store.put_new("_manifests/raw-1.json", b'{"partitions":{"2026-03-10/a":{"digest":"","files":["f"],"rows":3}},'
                       b'"sources":{},"state":{}}')  # fmt: skip
    lake.store.put_new("_log/000000000001.json", b'{"number": 1, "tables": {"raw": "_manifests/raw-1.json"}}')
    manifest = lake.manifest("raw")
    assert manifest.rows == 3
    lake.verify(manifest, manifest.partitions)
    lake.commit(lake.root(), {"usage": one("u")})
    assert lake.manifest("raw").rows == 3
