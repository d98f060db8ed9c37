"""The environment of each system: pinned packages, installed into a cache directory."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "drivers"
# Written last, so that an interrupted installation is started again.
STAMP = "installed"
TIMEOUT_SECONDS = 600


class InstallError(Exception):
    """A system cannot be installed. `detail` is the output of the installer."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def project(cache: Path) -> Path:
    """Return the Python that runs the benchmark, which contains codeQ."""
    return Path(sys.executable)


def python_environment(name: str, cache: Path) -> Path:
    """Install `requirements/<name>.txt` into a virtual environment, and return its Python.

    Raises InstallError.
    """
    requirements = HERE / "requirements" / f"{name}.txt"
    directory = cache / name
    python = directory / "bin" / "python"
    digest = _digest(requirements)
    if _is_installed(directory, digest):
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)])
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run([*pip, "-r", str(requirements)])
    (directory / STAMP).write_text(digest, encoding="utf-8")
    return python


def node_environment(name: str, cache: Path) -> Path:
    """Install `<name>/package-lock.json`, and return the driver beside its packages.

    Raises InstallError.
    """
    source, directory = HERE / name, cache / name
    digest = _digest(source / "package-lock.json")
    if not _is_installed(directory, digest):
        if shutil.which("node") is None or shutil.which("npm") is None:
            raise InstallError("node and npm are not installed")
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(source, directory)
        _run(
            ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"],
            directory,
        )
        (directory / STAMP).write_text(digest, encoding="utf-8")
    # Node searches for packages from the program's own directory.
    return Path(shutil.copy(DRIVERS / f"{name}.mjs", directory))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes() + sys.version.encode()).hexdigest()


def _is_installed(directory: Path, digest: str) -> bool:
    stamp = directory / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == digest


def _run(argv: list[str], directory: Path | None = None) -> None:
    try:
        completed = subprocess.run(
            argv, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{Path(argv[0]).name} took longer than {TIMEOUT_SECONDS} s") from error
    if completed.returncode != 0:
        output = (completed.stderr or completed.stdout).strip()
        raise InstallError(f"{Path(argv[0]).name} ended with exit code {completed.returncode}", output)
