"""Read and atomically create small files, on a local disk or through Hadoop."""

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
    """Return a checksum that detects a changed byte or a truncated file.

    It does not detect deliberate tampering.
    """
    return f"{len(data)}-{zlib.crc32(data):08x}"


class Store(Protocol):
    """The file operations that a lake needs.

    Names are relative to the store, with `/` as the separator.
    """

    url: str

    def read(self, name: str) -> bytes | None: ...

    def put_new(self, name: str, data: bytes) -> bool:
        """Create the file atomically. Return False and change nothing if it already exists."""
        ...

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names directly inside the folder.

        The list is empty if the folder does not exist.
        """
        ...

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file below the folder, by the name relative to the store."""
        ...

    def compute_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksum of each of these files. Files that do not exist are left out."""
        ...

    def delete(self, name: str) -> None: ...


class LocalStore:
    """A directory on this machine.

    It does not use Spark, so a notebook can read a lake without Spark.
    """

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
            # Creating a link fails if the name exists. A rename would silently replace another run's file.
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

    def list_names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / folder) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def list_sizes(self, folder: str) -> dict[str, int]:
        sizes = {}
        for parent, _, names in os.walk(self.root / folder):
            for name in names:
                if not name.startswith((".", "_")):
                    path = Path(parent) / name
                    sizes[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return dict(sorted(sizes.items()))

    def compute_checksums(self, names: Sequence[str]) -> dict[str, str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return {
                name: sum_ for name, sum_ in zip(names, pool.map(self._compute_checksum, names), strict=True) if sum_
            }

    def _compute_checksum(self, name: str) -> str | None:
        try:
            with (self.root / name).open("rb") as file:
                size = crc = 0
                while chunk := file.read(1 << 20):
                    size, crc = size + len(chunk), zlib.crc32(chunk, crc)
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
    """A file system of the session's Hadoop: `s3a://`, `hdfs://`, `abfss://`, `gs://`.

    On an object store, an object appears when its stream is closed, and that step must not overwrite another object.
    S3A needs an option for this (Hadoop >= 3.4.2). Without it, S3A checks whether the object exists before writing,
    and overwrites an object that was created in the meantime. On other file systems, the atomic step is a rename that
    does not overwrite.
    """

    OBJECTS = ("s3a", "gs", "abfs", "abfss", "wasb", "wasbs", "oss", "cosn")
    NO_OVERWRITE = ("gs", "abfs", "abfss")  # object stores that create without overwriting, in one request
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
        if self._is_object and not self.is_conditional and scheme not in self.NO_OVERWRITE:
            logger.warning(
                "%s:// cannot create objects without overwriting. Run only one pipeline at a time on this lake.", scheme
            )

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
            if "FileNotFoundException" in _list_java_exceptions(error):
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
            # Do not close the stream after a failed write: closing would create an object of the data written so far.
            stream.close()
            if not self._is_object:
                no_overwrite = self._jvm.org.apache.hadoop.fs.Options.Rename.valueOf("NONE")
                file_context = self._hadoop.fs.FileContext.getFileContext(self._path("").toUri(), self._conf)
                options = self._jvm.java.lang.reflect.Array.newInstance(no_overwrite.getClass(), 1)
                options[0] = no_overwrite
                file_context.rename(written, target, options)
        except Exception as error:
            if _list_java_exceptions(error) & ALREADY_EXISTS:
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

    def list_names(self, folder: str) -> list[str]:
        path = self._path(folder)
        if not self._fs.exists(path):
            return []
        return sorted(
            name
            for name in (status.getPath().getName() for status in self._fs.listStatus(path))
            if not name.startswith(".") and not name.endswith(".staged")
        )

    def list_sizes(self, folder: str) -> dict[str, int]:
        path = self._path(folder)
        if not self._fs.exists(path):
            return {}
        sizes, listing = {}, self._fs.listFiles(path, True)
        prefix = self._fs.makeQualified(self._path("")).toString().rstrip("/") + "/"
        while listing.hasNext():
            status = listing.next()
            file = status.getPath()
            if not file.getName().startswith((".", "_")):
                sizes[file.toString().removeprefix(prefix)] = status.getLen()
        return dict(sorted(sizes.items()))

    def compute_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Compute the checksums in Spark tasks, which may run closer to the files."""
        from pyspark.sql import functions as F

        # Each check is a round trip to the object store.
        with ThreadPoolExecutor(16) as pool:
            exists = pool.map(lambda name: self._fs.exists(self._path(name)), names)
            existing = [name for name, is_existing in zip(names, exists, strict=True) if is_existing]
        if not existing:
            return {}
        contents = self._spark.read.format("binaryFile").load([f"{self.url}/{name}" for name in existing])
        checksums = contents.select("path", "length", F.lower(F.lpad(F.hex(F.crc32("content")), 8, "0")).alias("crc"))
        by_path = {row["path"]: f"{row['length']}-{row['crc']}" for row in checksums.collect()}
        paths = {name: self._fs.makeQualified(self._path(name)).toString() for name in existing}
        # Spark skips empty files.
        return {name: by_path.get(path, checksum(b"")) for name, path in paths.items()}

    def delete(self, name: str) -> None:
        self._fs.delete(self._path(name), True)


# Another writer created the file first: detected before writing (FileAlreadyExists) or at its end (412 from S3A).
ALREADY_EXISTS = {"FileAlreadyExistsException", "RemoteFileChangedException"}


def _list_java_exceptions(error: Exception) -> set[str]:
    """Return the class names of the Java exceptions that caused this error.

    PySpark exposes some of them directly and wraps others in its own exceptions.
    """
    names: set[str] = set()
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None:
        names.add(java.getClass().getSimpleName())
        java = java.getCause()
    return names


def _get_scheme(url: str) -> str:
    return urlsplit(url).scheme if "://" in url else "file"


def is_local(url: str) -> bool:
    return _get_scheme(url) == "file"


def open_store(url: str, spark: Any = None) -> Store:
    """Return the store for a URL.

    All URLs except local ones need a Spark session, whose file systems are used.
    """
    scheme = _get_scheme(url)
    if urlsplit(url).password:
        # The URL appears in errors, logs and query plans.
        raise ValueError(
            f"{scheme}://: the URL contains a secret. Configure keys in the environment or in Spark instead."
        )
    if is_local(url):
        return LocalStore(url)
    if spark is None:
        raise ValueError(f"{scheme}:// requires a Spark session")
    return HadoopStore(url, spark)
