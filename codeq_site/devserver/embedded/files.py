"""Files and directories that only their owner can read."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from codeq_site.devserver.supervisor import StartError

# The longest path of a unix socket: 108 bytes with the final NUL on Linux, 104 on macOS.
SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
# The longest path below the directory of sockets.
LONGEST_SOCKET = Path("postgresql") / ".s.PGSQL.5432"


def socket_directory(home: Path) -> Path:
    """Return the directory for sockets: `home/run`, or a shorter path if necessary.

    Raises StartError if the shorter path belongs to another user.
    """
    run = home / "run"
    if len(os.fsencode(run / LONGEST_SOCKET)) <= SOCKET_PATH_BYTES:
        private_directory(run)
        return run
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"codeq-{name}"
    private_directory(short)
    # The name is predictable: another user may have created the directory first, to read the traffic.
    status = short.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise StartError(f"{short} belongs to another user: remove it, or set a shorter CODEQ_HOME.")
    return short


def private_directory(path: Path) -> Path:
    """Create a directory that only its owner can enter. Raises StartError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StartError(
            f"Cannot write to {path} ({error.strerror}): set another CODEQ_HOME, or give this user permission."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"Cannot write to {path}: set another CODEQ_HOME, or give this user permission.")
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. A crash leaves the former file."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
