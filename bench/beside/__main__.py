"""The command line of the comparison: see `bench.beside`."""

from __future__ import annotations

import argparse
import datetime as dt
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg
import redis

from bench.beside import report
from bench.beside.environments import InstallError
from bench.beside.measure import FULL, QUICK, Sizes, measure_once
from bench.beside.processes import MeasurementError, end_leftovers
from bench.beside.systems import System, select_systems
from codeq_site.devserver.supervisor import StartError

ROOT = Path(__file__).resolve().parents[2]
# A run that was interrupted, or in which a system failed, is continued if it ended less than this time ago.
CONTINUE_SECONDS = 6 * 3600
INTERRUPTED = 130
RUN = "run"


class Comparison:
    """A run over all rounds and systems. Each measurement is stored when it ends."""

    def __init__(self, sizes: Sizes, systems: list[System], cache: Path) -> None:
        self.sizes, self.systems, self.cache = sizes, systems, cache
        self.started = time.monotonic()
        # A run of one round is not continued.
        self.unfinished = cache / "unfinished.json" if sizes.rounds > 1 else None
        self.source = _source_digest()
        self.results: dict[str, Any] = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "sizes": sizes._asdict(),
            "systems": [system.key for system in systems],
            "versions": {},
            "failures": {},
            "measurements": [],
        }

    def continue_unfinished(self) -> None:
        """Keep the measurements of a recent unfinished run of the same code, sizes and systems."""
        if self.unfinished is None or not self.unfinished.is_file():
            return
        if time.time() - self.unfinished.stat().st_mtime > CONTINUE_SECONDS:
            return
        stored = json.loads(self.unfinished.read_text(encoding="utf-8"))
        former = stored["results"]
        is_same = all(former[name] == self.results[name] for name in ("cores", "sizes", "systems"))
        if is_same and stored["source"] == self.source:
            self.results |= {name: former[name] for name in ("versions", "measurements")}
            self.say(f"continuing after {len(former['measurements'])} measurements; --fresh starts again")

    def run(self) -> None:
        installed = self._install()
        done = {(entry["round"], entry["system"]) for entry in self.results["measurements"]}
        for round_number in range(1, self.sizes.rounds + 1):
            for system in self.systems:
                if system.key in installed and (round_number, system.key) not in done:
                    self._measure(round_number, system, installed[system.key])

    def finish(self) -> None:
        """Forget the stored measurements.

        If a system failed, keep them: the next run then measures only that system again.
        """
        if self.unfinished is not None and not self.results["failures"]:
            self.unfinished.unlink(missing_ok=True)

    def _install(self) -> dict[str, Path]:
        installed = {}
        for system in self.systems:
            self.say(f"{system.key}: environment")
            try:
                installed[system.key] = system.install(self.cache)
            except InstallError as error:
                self._fail(system, f"cannot be installed: {error}", error.detail)
        return installed

    def _measure(self, round_number: int, system: System, installed: Path) -> None:
        load = os.getloadavg()[0]
        place = f"round {round_number} of {self.sizes.rounds}, {system.key}"
        try:
            figures, versions = measure_once(
                system,
                installed,
                self.cache / RUN,
                self.sizes,
                lambda step: self.say(f"{place}: {step}"),
            )
        except MeasurementError as error:
            self._fail(system, f"round {round_number}: {error}", error.detail)
            return
        except StartError as error:
            self._fail(system, f"round {round_number}: its store did not start", str(error))
            return
        except (redis.RedisError, psycopg.Error, OSError, ValueError) as error:
            self._fail(system, f"round {round_number}: its store failed", repr(error))
            return
        shown = [f"{name} {value:,.{1 if value < 100 else 0}f}" for name, value in _flat(figures)]
        self.say(f"{place}: {', '.join(shown)}")
        self.results["versions"][system.key] = versions
        self.results["measurements"].append(
            {"round": round_number, "system": system.key, "load": round(load, 1), "figures": figures}
        )
        if self.unfinished is not None:
            text = json.dumps({"source": self.source, "results": self.results})
            self.unfinished.write_text(text, encoding="utf-8")

    def _fail(self, system: System, reason: str, detail: str) -> None:
        """Record that a system has no figures.

        The detail, which may name files and hosts, is only printed.
        """
        self.say(f"{system.key}: {reason}" + (f"\n{detail}" if detail else ""))
        self.results["failures"][system.name] = reason

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.0f} s] {text}", file=sys.stderr, flush=True)


def _source_digest() -> str:
    """Return a digest of the code, or "" without git."""
    if shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(ROOT)]
    outputs = [
        subprocess.run([*git, *arguments], capture_output=True, check=False).stdout
        for arguments in (["rev-parse", "HEAD"], ["diff", "HEAD", "--", "*.py", "*.lua", "*.mjs"])
    ]
    return hashlib.sha256(b"".join(outputs)).hexdigest() if any(outputs) else ""


def _flat(figures: dict[str, dict[str, float]]) -> list[tuple[str, float]]:
    return [(f"{operation} {field}", value) for operation, values in figures.items() for field, value in values.items()]


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache directory. Exit if another comparison holds it."""
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"Another comparison runs with {cache}.")
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description="Compare codeQ with other task queues.")
    parser.add_argument("--quick", action="store_true", help="one short round, printed")
    parser.add_argument("--systems", help="keys of systems, separated by commas (default: all)")
    parser.add_argument(
        "--write", action="store_true", help="write the results and the page even after a quick or partial run"
    )
    parser.add_argument("--fresh", action="store_true", help="do not continue an interrupted run")
    parser.add_argument("--cache", type=Path, default=ROOT / ".venv" / "bench", help="directory of the environments")
    arguments = parser.parse_args()
    systems = select_systems(arguments.systems)
    cache = arguments.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _interrupt)
    comparison = Comparison(QUICK if arguments.quick else FULL, systems, cache)
    try:
        with _lock(cache):
            end_leftovers(cache / RUN)
            if not arguments.fresh:
                comparison.continue_unfinished()
            comparison.run()
    except KeyboardInterrupt:
        comparison.say("interrupted" + ("" if arguments.quick else "; the same command continues"))
        return INTERRUPTED
    results = comparison.results
    if not results["measurements"]:
        return 1
    print(report.as_text(report.build_section(results)))
    is_complete = arguments.systems is None
    if arguments.write or (is_complete and not arguments.quick):
        report.RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        for file in report.write(results):
            comparison.say(f"wrote {file.relative_to(ROOT)}")
    comparison.finish()
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
