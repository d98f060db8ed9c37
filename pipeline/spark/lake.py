"""The lake: Parquet files that never change, and one small pointer that says which of them are the tables now.

    <table>/run=<run>/[kind=<kind>/]date=<day>/tenant=<tid>/….parquet   data, written under a fresh name by each run
    _manifests/<table>-<run>.json                                       a table: its partitions and their files
    _log/<number>.json                                                  the lake: which manifest each table has

A run writes data, then manifests, then creates the next number in `_log`; creating it fails if somebody else has
that number. So a reader who takes the highest number sees every table as one run left it, a crash at any point
leaves only files that nobody refers to, and of two runs at once the second learns that the ground has moved.

The pointer knows the checksum of each manifest and of itself, a manifest that of each file: whoever reads through
here reads what was written, or an error that names the file. Parquet's own checksums leave out its footer, without
which a byte may turn into another number. The lake is a copy: what is damaged is read again from the audit (`--since`).
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

KEEP_ROOTS = 20
KEEP_SECONDS = 24 * 3600
KEEP_LOADS_SECONDS = 7 * 24 * 3600


class Damaged(RuntimeError):
    """This file is not as it was written: read its day again from the audit (`--since`), or bring it back."""

    def __init__(self, file: str) -> None:
        super().__init__(f"{file}: {self.__doc__}")


class Conflict(RuntimeError):
    """Another run has published what this one had read or written: compute again from what is there now."""


@dataclass(frozen=True)
class Partition:
    """The files of one partition, how many rows they hold, and a digest of the rows in any order."""

    files: tuple[str, ...]
    rows: int
    digest: str = ""
    sums: tuple[str, ...] = ()  # of the files, as the store says them

    @property
    def identity(self) -> str:
        return self.digest or hashlib.sha256("\n".join(self.files).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Manifest:
    """One table. `sources` says what the rows of a day and tenant were computed from."""

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(partition.rows for partition in self.partitions.values())

    def stale(self, others: Mapping[str, str], anew: Callable[[str], bool]) -> set[str]:
        """The days and tenants of which either side says another source, or that are to be made anew."""
        return {
            key for key in self.sources.keys() | others.keys() if self.sources.get(key) != others.get(key) or anew(key)
        }

    def dump(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        plain = json.loads(data)
        return cls(
            {
                # A manifest that was written before there were sums has none.
                key: Partition(tuple(each["files"]), each["rows"], each["digest"], tuple(each.get("sums", ())))
                for key, each in plain["partitions"].items()
            },
            plain["sources"],
            plain["state"],
        )


@dataclass(frozen=True)
class Root:
    """The lake at one moment: every table's manifest by name, and its checksum by that."""

    number: int = 0
    tables: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        plain = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"root": plain, "sum": checksum(plain.encode())}).encode()

    @classmethod
    def load(cls, data: bytes, name: str) -> Root:
        try:
            plain = json.loads(data)
            if "root" in plain:
                if checksum(plain["root"].encode()) != plain["sum"]:
                    raise Damaged(name)
                plain = json.loads(plain["root"])
            return cls(plain["number"], plain["tables"], plain.get("sums", {}))
        except (ValueError, KeyError) as error:
            raise Damaged(name) from error


def new_run() -> str:
    """A name for a run's files. It begins with the time, which is all that cleaning up needs to know of it."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


class Lake:
    def __init__(self, url: str, spark: Any = None, *, store: Store | None = None) -> None:
        self.store = store or open_store(url, spark)
        self.url = self.store.url

    def root(self) -> Root:
        numbers = self.store.names("_log")
        # Between the listing and the reading a newer root may have made this one old enough to be removed.
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
            raise FileNotFoundError(f"{self.url}/{name}: the manifest of {table} is gone")
        if root.sums.get(name, checksum(data)) != checksum(data):
            raise Damaged(f"{self.url}/{name}")
        return Manifest.load(data)

    def commit(self, base: Root, changes: Mapping[str, Manifest], read: Iterable[str] = ()) -> Root:
        """Make these tables what readers see, all at once.

        Raises Conflict where, since `base`, another run has changed one of them or one of `read`.
        """
        run = new_run()
        written, sums = {}, {}
        for table, manifest in changes.items():
            name, data = f"_manifests/{table}-{run}.json", manifest.dump()
            written[table], sums[name] = name, checksum(data)
            if not self.store.put_new(name, data):
                raise Conflict(f"{name} exists")
        guarded = {*changes, *read}
        while True:
            latest = self.root()
            moved = [table for table in guarded if latest.tables.get(table) != base.tables.get(table)]
            if moved:
                raise Conflict(f"another run has published {', '.join(sorted(moved))}")
            tables = {**latest.tables, **written}
            known = {name: sum_ for name, sum_ in {**latest.sums, **sums}.items() if name in tables.values()}
            root = Root(latest.number + 1, tables, known)
            if self.store.put_new(f"_log/{root.number:012d}.json", root.dump()):
                return root

    def paths(self, manifest: Manifest, keys: Iterable[str]) -> list[str]:
        """Where the rows of these partitions are, for Spark."""
        return [f"{self.url}/{file}" for key in sorted(keys) for file in manifest.partitions[key].files]

    def check(self, manifest: Manifest, keys: Iterable[str], known: set[str] | None = None) -> None:
        """Hold the files of these partitions against what was written. Raises Damaged with the first that differs.
        `known` are files that this run has checked before, and will be those it has now."""
        known = set() if known is None else known
        wanted = {
            file: sum_
            for key in keys
            for file, sum_ in zip(manifest.partitions[key].files, manifest.partitions[key].sums, strict=False)
            if file not in known
        }
        found = self.store.sums(sorted(wanted))
        for file in wanted:
            if found.get(file) != wanted[file]:
                raise Damaged(f"{self.url}/{file}")
        known |= wanted.keys()

    def vacuum(self, keep: timedelta = timedelta(seconds=KEEP_SECONDS)) -> int:
        """Remove what no kept root refers to and is older than any run or reader could be. Returns how many."""
        before = f"{datetime.now(UTC) - keep:%Y%m%dT%H%M%S}"
        roots = self.store.names("_log")
        manifests: set[str] = set()
        kept = 0
        for name in reversed(roots):
            data = self.store.read(f"_log/{name}")
            tables = Root.load(data, name).tables if data else {}
            # Each manifest's name ends with its run, and a run's name begins with its time.
            newest = max((_run_of(m) for m in tables.values()), default="")
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
        for name in self.store.names("_manifests"):
            if f"_manifests/{name}" not in manifests and _run_of(name) < before:
                self.store.delete(f"_manifests/{name}")
                removed += 1
        for table in self.store.names(""):
            for folder in self.store.names(table) if not table.startswith("_") else ():
                run = folder.removeprefix("run=")
                if folder.startswith("run=") and run not in runs and run < before:
                    self.store.delete(f"{table}/{folder}")
                    removed += 1
        return removed + self._forget_loads()

    def _forget_loads(self) -> int:
        """A load that nobody resumes is forgotten, with the rows it had staged: they are somebody's payloads."""
        before = f"{datetime.now(UTC) - timedelta(seconds=KEEP_LOADS_SECONDS):%Y%m%dT%H%M%S}"
        old = [
            name
            for name in self.store.names("_loads")
            if (self.store.read(f"_loads/{name}/begun") or b"").decode() < before
        ]
        for name in old:
            self.store.delete(f"_loads/{name}")
        return len(old)


def _run_of(manifest: str) -> str:
    return "-".join(manifest.removesuffix(".json").split("-")[-2:])


def files(url: str, table: str, *, tenant: str | None = None, spark: Any = None, checked: bool = False) -> list[str]:
    """The Parquet files of a table as it is now, for any reader: pandas, DuckDB, Polars, Spark.

    `tenant` narrows a table that is partitioned by tenant; a mart holds its tenants side by side. With `checked` each
    file is held against its checksum: Damaged names one that differs.
    """
    lake = Lake(url, spark)
    manifest = lake.manifest(table)
    keys = [key for key in manifest.partitions if tenant is None or "/" not in key or key.split("/")[1] == tenant]
    if checked:
        lake.check(manifest, keys)
    return lake.paths(manifest, keys)
