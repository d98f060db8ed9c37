"""The lake: immutable Parquet files, and a pointer file that names the current tables.

    <table>/run=<run>/[kind=<kind>/]date=<day>/tenant=<tid>/….parquet   data; each run writes under a new name
    _manifests/<table>-<run>.json                                       a table: its partitions and their files
    _log/<number>.json                                                  the lake: the manifest of each table

A run writes data, then manifests, and then creates the next number in `_log`, which fails if another run has created
it. So a reader that takes the highest number sees every table in the state of one commit. A crash at any point leaves
only unreferenced files. Of two concurrent runs, the second one detects that the tables it read have changed.

The pointer holds the checksums of itself and of each manifest, and a manifest holds the checksum of each file. A read
through this module returns the data that was written, or raises an error that names the file. Parquet's own checksums
do not cover the footer, where a changed byte can silently change values. The lake is a copy of the audit: damaged
data can be read from the audit again (`--since`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.spark.store import Store, checksum, open_store

# `vacuum` keeps at least this number of roots, everything that is younger than KEEP_SECONDS, and the state of loads
# that began less than KEEP_LOADS_SECONDS ago.
KEEP_ROOTS = 20
KEEP_SECONDS = 24 * 3600
KEEP_LOADS_SECONDS = 7 * 24 * 3600


class DamagedFile(RuntimeError):
    """The file differs from the one written. Read its day again (`--since`), or restore it."""

    def __init__(self, file: str) -> None:
        super().__init__(f"{file}: {self.__doc__}")


class PublishConflict(RuntimeError):
    """Another run has published a table that this run read or wrote.

    Compute the result again from the current tables.
    """


@dataclass(frozen=True)
class Partition:
    """The files of one partition, with the number and a digest of their rows.

    The digest does not depend on the order of the rows.
    """

    files: tuple[str, ...]
    rows: int
    digest: str = ""
    sums: tuple[str, ...] = ()  # checksums of the files, from the store

    @property
    def identity(self) -> str:
        return self.digest or hashlib.sha256("\n".join(self.files).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Manifest:
    """One version of a table.

    `sources` identifies the data that the rows of each day and tenant were computed from.
    """

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(partition.rows for partition in self.partitions.values())

    def find_stale_keys(self, sources: Mapping[str, str], must_recompute: Callable[[str], bool]) -> set[str]:
        """Return the keys whose source differs from that in `sources`, or that must be recomputed."""
        return {
            key
            for key in self.sources.keys() | sources.keys()
            if self.sources.get(key) != sources.get(key) or must_recompute(key)
        }

    def dump(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        fields = json.loads(data)
        return cls(
            {
                # Manifests of earlier releases have no checksums.
                key: Partition(tuple(part["files"]), part["rows"], part["digest"], tuple(part.get("sums", ())))
                for key, part in fields["partitions"].items()
            },
            fields["sources"],
            fields["state"],
        )


@dataclass(frozen=True)
class Root:
    """The content of a pointer file: one version of the lake.

    It names the manifest of each table, and holds the checksum of each manifest.
    """

    number: int = 0
    tables: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        root = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"root": root, "sum": checksum(root.encode())}).encode()

    @classmethod
    def load(cls, data: bytes, name: str) -> Root:
        try:
            fields = json.loads(data)
            if "root" in fields:
                if checksum(fields["root"].encode()) != fields["sum"]:
                    raise DamagedFile(name)
                fields = json.loads(fields["root"])
            return cls(fields["number"], fields["tables"], fields.get("sums", {}))
        except (ValueError, KeyError) as error:
            raise DamagedFile(name) from error


def new_run_id() -> str:
    """Return a unique name for a run's files.

    It begins with the current time, which `vacuum` compares.
    """
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


class Lake:
    """A lake under a URL: read its tables, and publish new versions of them."""

    def __init__(self, url: str, spark: Any = None, *, store: Store | None = None) -> None:
        self.store = store or open_store(url, spark)
        self.url = self.store.url

    def root(self) -> Root:
        numbers = self.store.list_names("_log")
        # Another process may delete an old root between the listing and the read.
        for name in reversed(numbers):
            data = self.store.read(f"_log/{name}")
            if data is not None:
                return Root.load(data, f"{self.url}/_log/{name}")
        return Root()

    def manifest(self, table: str, root: Root | None = None) -> Manifest:
        root = root or self.root()
        name = root.tables.get(table)
        if name is None:
            return Manifest()
        data = self.store.read(name)
        if data is None:
            raise FileNotFoundError(f"{self.url}/{name}: the manifest of {table} is missing")
        if root.sums.get(name, checksum(data)) != checksum(data):
            raise DamagedFile(f"{self.url}/{name}")
        return Manifest.load(data)

    def commit(self, base: Root, changes: Mapping[str, Manifest], read: Iterable[str] = ()) -> Root:
        """Publish these tables in one atomic step.

        Raises PublishConflict if another run has changed one of them, or one of the tables in `read`, since `base`.
        """
        run = new_run_id()
        new_tables, new_sums = {}, {}
        for table, manifest in changes.items():
            name, data = f"_manifests/{table}-{run}.json", manifest.dump()
            new_tables[table], new_sums[name] = name, checksum(data)
            if not self.store.put_new(name, data):
                raise PublishConflict(f"{name} already exists")
        guarded = {*changes, *read}
        while True:
            latest = self.root()
            changed = [table for table in guarded if latest.tables.get(table) != base.tables.get(table)]
            if changed:
                raise PublishConflict(f"another run has published {', '.join(sorted(changed))}")
            tables = {**latest.tables, **new_tables}
            sums = {name: sum_ for name, sum_ in {**latest.sums, **new_sums}.items() if name in tables.values()}
            root = Root(latest.number + 1, tables, sums)
            if self.store.put_new(f"_log/{root.number:012d}.json", root.dump()):
                return root

    def paths(self, manifest: Manifest, keys: Iterable[str]) -> list[str]:
        """Return the URLs of the files of these partitions, for Spark."""
        return [f"{self.url}/{file}" for key in sorted(keys) for file in manifest.partitions[key].files]

    def verify(self, manifest: Manifest, keys: Iterable[str], verified_files: set[str] | None = None) -> None:
        """Compare the files of these partitions with their checksums.

        Raises DamagedFile for the first file that differs. Files in `verified_files` are skipped, and the files
        of this call are added to it.
        """
        verified_files = set() if verified_files is None else verified_files
        expected = {
            file: sum_
            for key in keys
            for file, sum_ in zip(manifest.partitions[key].files, manifest.partitions[key].sums, strict=False)
            if file not in verified_files
        }
        actual = self.store.compute_checksums(sorted(expected))
        for file in expected:
            if actual.get(file) != expected[file]:
                raise DamagedFile(f"{self.url}/{file}")
        verified_files |= expected.keys()

    def vacuum(self, keep: timedelta = timedelta(seconds=KEEP_SECONDS)) -> int:
        """Remove files that no kept root refers to and that are older than `keep`.

        Return the number of removed manifests, folders of runs, and loads. `keep` must exceed the duration of any run
        or read.
        """
        before = f"{datetime.now(UTC) - keep:%Y%m%dT%H%M%S}"
        roots = self.store.list_names("_log")
        manifests: set[str] = set()
        kept = 0
        for name in reversed(roots):
            data = self.store.read(f"_log/{name}")
            tables = Root.load(data, name).tables if data else {}
            # A manifest's name ends with its run, and a run's name begins with its time.
            newest = max((_get_run_id(m) for m in tables.values()), default="")
            if kept < KEEP_ROOTS or newest >= before:
                manifests |= set(tables.values())
                kept += 1
            else:
                self.store.delete(f"_log/{name}")
        runs: set[str] = set()
        for name in manifests:
            data = self.store.read(name)
            if data:
                for partition in Manifest.load(data).partitions.values():
                    runs |= {file.split("/run=")[1].split("/")[0] for file in partition.files}
        removed = 0
        for name in self.store.list_names("_manifests"):
            if f"_manifests/{name}" not in manifests and _get_run_id(name) < before:
                self.store.delete(f"_manifests/{name}")
                removed += 1
        for table in self.store.list_names(""):
            for folder in self.store.list_names(table) if not table.startswith("_") else ():
                run = folder.removeprefix("run=")
                if folder.startswith("run=") and run not in runs and run < before:
                    self.store.delete(f"{table}/{folder}")
                    removed += 1
        return removed + self._remove_old_loads()

    def _remove_old_loads(self) -> int:
        """Remove old loads with their staged rows, which contain payloads."""
        before = f"{datetime.now(UTC) - timedelta(seconds=KEEP_LOADS_SECONDS):%Y%m%dT%H%M%S}"
        old = [
            name
            for name in self.store.list_names("_loads")
            if (self.store.read(f"_loads/{name}/begun") or b"").decode() < before
        ]
        for name in old:
            self.store.delete(f"_loads/{name}")
        return len(old)


def _get_run_id(manifest: str) -> str:
    return "-".join(manifest.removesuffix(".json").split("-")[-2:])


def files(url: str, table: str, *, tenant: str | None = None, spark: Any = None, checked: bool = False) -> list[str]:
    """Return the URLs of the Parquet files of a table's current version.

    Any reader can use them: pandas, DuckDB, Polars, Spark. `tenant` selects the files of one tenant from a table that
    is partitioned by tenant; a file of a mart contains all tenants. With `checked`, each file is compared with its
    checksum, and DamagedFile names one that differs.
    """
    lake = Lake(url, spark)
    manifest = lake.manifest(table)
    keys = [key for key in manifest.partitions if tenant is None or "/" not in key or key.split("/")[1] == tenant]
    if checked:
        lake.verify(manifest, keys)
    return lake.paths(manifest, keys)
