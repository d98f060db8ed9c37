"""Files and directories that nobody else reads."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from codeq_site.devserver.supervisor import StartError

# sun_path holds 108 bytes with its final NUL on Linux, 104 on macOS.
SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
# The longest name that is put below the directory of sockets.
LONGEST_SOCKET = Path("postgresql") / ".s.PGSQL.5432"


def socket_directory(home: Path) -> Path:
    """Where the sockets of this home are: `home/run`, or a short private directory when that path is too long."""
    run = home / "run"
    if len(os.fsencode(run / LONGEST_SOCKET)) <= SOCKET_PATH_BYTES:
        private_directory(run)
        return run
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"codeq-{name}"
    private_directory(short)
    # The name can be guessed, so somebody else may have made it first, to read what passes through.
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise StartError(f"{short} belongs to somebody else: remove it, or choose a shorter CODEQ_HOME.")
    return short


def private_directory(path: Path) -> Path:
    """Make a directory for its owner alone."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartError(
            f"Cannot write to {path} ({error.strerror}): choose another CODEQ_HOME, or give its owner the right."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"Cannot write to {path}: choose another CODEQ_HOME, or give this user the right.")
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    half = path.with_name(path.name + ".new")
    half.unlink(missing_ok=True)
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
