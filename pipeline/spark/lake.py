"""The lake: Parquet files that never change, and one small pointer that says which of them are the tables now.

    <table>/run=<run>/[kind=<kind>/]date=<day>/tenant=<tid>/….parquet   data, written under a fresh name by each run
    _manifests/<table>-<run>.json                                       a table: its partitions and their files
    _log/<number>.json                                                  the lake: which manifest each table has

A run writes data, then manifests, then creates the next number in `_log`; creating it fails if somebody else has
that number. So a reader who takes the highest number sees every table as one run left it, a crash at any point
leaves only files that nobody refers to, and of two runs at once the second learns that the ground has moved. The
lake is a copy: what a power failure tears is noticed by checksums and read again from the audit (`--since`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.spark.store import Store, open_store

KEEP_ROOTS = 20
KEEP_SECONDS = 24 * 3600
KEEP_LOADS_SECONDS = 7 * 24 * 3600


class Conflict(RuntimeError):
    """Another run has published what this one had read or written: compute again from what is there now."""


@dataclass(frozen=True)
class Partition:
    """The files of one partition, how many rows they hold, and a digest of the rows in any order."""

    files: tuple[str, ...]
    rows: int
    digest: str = ""

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

    def dump(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        plain = json.loads(data)
        return cls(
            {k: Partition(tuple(p["files"]), p["rows"], p["digest"]) for k, p in plain["partitions"].items()},
            plain["sources"],
            plain["state"],
        )


@dataclass(frozen=True)
class Root:
    """The lake at one moment: every table's manifest by name."""

    number: int = 0
    tables: Mapping[str, str] = field(default_factory=dict)


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
                plain = json.loads(data)
                return Root(plain["number"], plain["tables"])
        return Root()

    def manifest(self, table: str, root: Root | None = None) -> Manifest:
        name = (root or self.root()).tables.get(table)
        if name is None:
            return Manifest()
        data = self.store.read(name)
        if data is None:
            raise FileNotFoundError(f"{self.url}/{name}: the manifest of {table} is gone")
        return Manifest.load(data)

    def commit(self, base: Root, changes: Mapping[str, Manifest], read: Iterable[str] = ()) -> Root:
        """Make these tables what readers see, all at once.

        Raises Conflict where, since `base`, another run has changed one of them or one of `read`.
        """
        run = new_run()
        written = {}
        for table, manifest in changes.items():
            written[table] = f"_manifests/{table}-{run}.json"
            if not self.store.put_new(written[table], manifest.dump()):
                raise Conflict(f"{written[table]} exists")
        guarded = {*changes, *read}
        while True:
            latest = self.root()
            moved = [table for table in guarded if latest.tables.get(table) != base.tables.get(table)]
            if moved:
                raise Conflict(f"another run has published {', '.join(sorted(moved))}")
            root = replace(latest, number=latest.number + 1, tables={**latest.tables, **written})
            if self.store.put_new(f"_log/{root.number:012d}.json", json.dumps(asdict(root)).encode()):
                return root

    def paths(self, manifest: Manifest, keys: Iterable[str]) -> list[str]:
        """Where the rows of these partitions are, for Spark."""
        return [f"{self.url}/{file}" for key in sorted(keys) for file in manifest.partitions[key].files]

    def vacuum(self, keep: timedelta = timedelta(seconds=KEEP_SECONDS)) -> int:
        """Remove what no kept root refers to and is older than any run or reader could be. Returns how many."""
        before = f"{datetime.now(UTC) - keep:%Y%m%dT%H%M%S}"
        roots = self.store.names("_log")
        manifests: set[str] = set()
        kept = 0
        for name in reversed(roots):
            data = self.store.read(f"_log/{name}")
            tables = json.loads(data)["tables"] if data else {}
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


def files(url: str, table: str, *, tenant: str | None = None, spark: Any = None) -> list[str]:
    """The Parquet files of a table as it is now, for any reader: pandas, DuckDB, Polars, Spark.

    `tenant` narrows a table that is partitioned by tenant; a mart holds its tenants side by side.
    """
    lake = Lake(url, spark)
    manifest = lake.manifest(table)
    keys = [key for key in manifest.partitions if tenant is None or "/" not in key or key.split("/")[1] == tenant]
    return lake.paths(manifest, keys)
