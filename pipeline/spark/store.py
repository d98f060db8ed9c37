"""Small files of a lake as bytes: whole or not at all, on a local disk or on whatever Hadoop's file systems reach."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

logger = logging.getLogger(__name__)


def checksum(data: bytes) -> str:
    """Finds every flipped byte and every cut; not made against who wants to deceive."""
    return f"{len(data)}-{zlib.crc32(data):08x}"


class Store(Protocol):
    """What the lake needs of a file system. Names are relative, with `/`."""

    url: str

    def read(self, name: str) -> bytes | None: ...

    def put_new(self, name: str, data: bytes) -> bool:
        """Create this file: its readers see all of it or none. False, and nothing done, where it exists."""
        ...

    def names(self, folder: str) -> list[str]:
        """What is directly inside, sorted; empty where there is no such folder."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below with its size, by the name relative to the store."""
        ...

    def sums(self, names: Sequence[str]) -> dict[str, str]:
        """The checksum of each of these files; one that is not there has none."""
        ...

    def delete(self, name: str) -> None: ...


class LocalStore:
    """A directory of this machine. Never uses Spark, so a notebook can read a lake without it."""

    def __init__(self, url: str) -> None:
        self.root = Path(unquote(urlsplit(url).path) if "://" in url else url).absolute()
        self.url = self.root.as_uri()

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def put_new(self, name: str, data: bytes) -> bool:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.parent / f".{uuid.uuid4().hex}.staged"
        try:
            with staged.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # A link fails where the name exists; a rename would silently replace another run's file.
            os.link(staged, target)
        except FileExistsError:
            return False
        finally:
            staged.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for parent, _, names in os.walk(self.root / folder):
            for name in names:
                if not name.startswith((".", "_")):
                    path = Path(parent) / name
                    found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return dict(sorted(found.items()))

    def sums(self, names: Sequence[str]) -> dict[str, str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return {name: sum_ for name, sum_ in zip(names, pool.map(self._sum, names), strict=True) if sum_}

    def _sum(self, name: str) -> str | None:
        try:
            with (self.root / name).open("rb") as file:
                size = crc = 0
                while piece := file.read(1 << 20):
                    size, crc = size + len(piece), zlib.crc32(piece, crc)
        except FileNotFoundError:
            return None
        return f"{size}-{crc:08x}"

    def delete(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class HadoopStore:
    """Any file system the session's Hadoop knows: `s3a://`, `hdfs://`, `abfss://`, `gs://`.

    On an object store an object appears when its stream is closed, and is created there without overwriting. S3A does
    so only when asked (Hadoop >= 3.4.2): else it looks first and overwrites what has come since. Where the file
    system is none of objects, a rename that does not overwrite is the atomic step.
    """

    OBJECTS = ("s3a", "gs", "abfs", "abfss", "wasb", "wasbs", "oss", "cosn")
    EXCLUSIVE = ("gs", "abfs", "abfss")  # a create without overwriting is conditional at the store
    CONDITIONAL = "fs.option.create.conditional.overwrite"

    def __init__(self, url: str, spark: Any) -> None:
        self.url = url.rstrip("/")
        self._spark = spark
        self._jvm = spark.sparkContext._jvm
        self._conf = spark.sparkContext._jsc.hadoopConfiguration()
        self._hadoop = self._jvm.org.apache.hadoop
        self._fs = self._path("").getFileSystem(self._conf)
        scheme = urlsplit(self.url).scheme
        self._is_object = scheme in self.OBJECTS
        self.is_conditional = bool(self._fs.hasPathCapability(self._path(""), self.CONDITIONAL))
        if self._is_object and not self.is_conditional and scheme not in self.EXCLUSIVE:
            logger.warning("%s:// cannot create without overwriting: let one run at a time write to the lake", scheme)

    def _path(self, name: str) -> Any:
        return self._hadoop.fs.Path(f"{self.url}/{name}" if name else self.url)

    def read(self, name: str) -> bytes | None:
        try:
            stream = self._fs.open(self._path(name))
            try:
                return bytes(self._hadoop.io.IOUtils.readFullyToByteArray(stream))
            finally:
                stream.close()
        except Exception as error:
            if "FileNotFoundException" in _thrown(error):
                return None
            raise

    def put_new(self, name: str, data: bytes) -> bool:
        target = self._path(name)
        if self._fs.exists(target):
            return False
        written = target if self._is_object else self._path(f"{name}.{uuid.uuid4().hex}.staged")
        try:
            stream = self._create(written)
            stream.write(bytearray(data))
            # Not where the writing failed: what an object's stream has by then would become the object.
            stream.close()
            if not self._is_object:
                none = self._jvm.org.apache.hadoop.fs.Options.Rename.valueOf("NONE")
                renames = self._hadoop.fs.FileContext.getFileContext(self._path("").toUri(), self._conf)
                options = self._jvm.java.lang.reflect.Array.newInstance(none.getClass(), 1)
                options[0] = none
                renames.rename(written, target, options)
        except Exception as error:
            if _thrown(error) & FIRST:
                return False
            raise
        finally:
            if not self._is_object:
                self._fs.delete(written, False)
        return True

    def _create(self, path: Any) -> Any:
        if self.is_conditional:
            return self._fs.createFile(path).create().must(self.CONDITIONAL, "true").build()
        return self._fs.create(path, False)

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        if not self._fs.exists(path):
            return []
        return sorted(
            name
            for name in (status.getPath().getName() for status in self._fs.listStatus(path))
            if not name.startswith(".") and not name.endswith(".staged")
        )

    def sizes(self, folder: str) -> dict[str, int]:
        path = self._path(folder)
        if not self._fs.exists(path):
            return {}
        found, listing = {}, self._fs.listFiles(path, True)
        prefix = self._fs.makeQualified(self._path("")).toString().rstrip("/") + "/"
        while listing.hasNext():
            status = listing.next()
            file = status.getPath()
            if not file.getName().startswith((".", "_")):
                found[file.toString().removeprefix(prefix)] = status.getLen()
        return dict(sorted(found.items()))

    def sums(self, names: Sequence[str]) -> dict[str, str]:
        """By Spark's own tasks, where the files may be nearer."""
        from pyspark.sql import functions as F

        # Each question is a round trip to an object store.
        with ThreadPoolExecutor(16) as pool:
            found = pool.map(lambda name: self._fs.exists(self._path(name)), names)
            there = [name for name, is_there in zip(names, found, strict=True) if is_there]
        if not there:
            return {}
        read = self._spark.read.format("binaryFile").load([f"{self.url}/{name}" for name in there])
        summed = read.select("path", "length", F.lower(F.lpad(F.hex(F.crc32("content")), 8, "0")).alias("crc"))
        by_path = {row["path"]: f"{row['length']}-{row['crc']}" for row in summed.collect()}
        paths = {name: self._fs.makeQualified(self._path(name)).toString() for name in there}
        # Spark passes over a file without a byte.
        return {name: by_path.get(path, checksum(b"")) for name, path in paths.items()}

    def delete(self, name: str) -> None:
        self._fs.delete(self._path(name), True)


# Somebody was first: found before writing (FileAlreadyExists), or by the store at the end of it (412 to S3A).
FIRST = {"FileAlreadyExistsException", "RemoteFileChangedException"}


def _thrown(error: Exception) -> set[str]:
    """The names of the Java exceptions behind this one: PySpark keeps some as they are, and has its own for others."""
    names: set[str] = set()
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None:
        names.add(java.getClass().getSimpleName())
        java = java.getCause()
    return names


def _scheme(url: str) -> str:
    return urlsplit(url).scheme if "://" in url else "file"


def is_local(url: str) -> bool:
    return _scheme(url) == "file"


def open_store(url: str, spark: Any = None) -> Store:
    """The store behind a URL. Other than a local one needs a Spark session, whose file systems are used."""
    scheme = _scheme(url)
    if urlsplit(url).password:
        # Errors, logs and plans say where the lake is.
        raise ValueError(f"{scheme}:// with a secret in it: give keys by the environment or Spark's configuration")
    if is_local(url):
        return LocalStore(url)
    if spark is None:
        raise ValueError(f"{scheme}:// is read through a Spark session: none was given")
    return HadoopStore(url, spark)
