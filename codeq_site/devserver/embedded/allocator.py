"""The memory allocator of the embedded Valkey.

The wheel's Valkey uses the C library's allocator. With glibc, Lua's many small blocks fragment the heap: after two
million tasks the same work takes twice the CPU, and most of the resident memory is free (ADR 0016). Therefore another
allocator is preloaded: the system's jemalloc if it is installed, else the one of the `tbb` wheel.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

# Where Linux distributions install jemalloc.
_JEMALLOC_PATTERNS = ("lib/*-linux-gnu/libjemalloc.so.2", "lib64/libjemalloc.so.2", "lib/libjemalloc.so.2")
_TBB_LIBRARIES = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")


class Allocator(NamedTuple):
    """Libraries that replace malloc in the process that preloads them, in this order."""

    name: str
    libraries: tuple[Path, ...]


def find_allocator(root: Path = Path("/usr")) -> Allocator | None:
    """Return the best installed allocator, or None if only the C library's is there."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return None
    return _find_jemalloc(root) or find_tbb()


def _find_jemalloc(root: Path) -> Allocator | None:
    for pattern in _JEMALLOC_PATTERNS:
        for library in sorted(root.glob(pattern)):
            return Allocator("jemalloc", (library,))
    return None


def find_tbb() -> Allocator | None:
    try:
        files = metadata.files("tbb") or []
    except metadata.PackageNotFoundError:
        return None
    # The proxy finds its library only if that is loaded first.
    paths = {file.name: Path(str(file.locate())).resolve() for file in files if file.name in _TBB_LIBRARIES}
    libraries = tuple(paths[name] for name in _TBB_LIBRARIES if name in paths and paths[name].is_file())
    return Allocator("tbbmalloc", libraries) if len(libraries) == len(_TBB_LIBRARIES) else None
