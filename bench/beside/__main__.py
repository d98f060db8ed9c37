"""The command line of the comparison: see `bench.beside`."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from bench.beside import report
from bench.beside.environments import InstallError
from bench.beside.measure import FULL, QUICK, Sizes, measure_once
from bench.beside.processes import MeasurementError
from bench.beside.systems import System, select_systems
from codeq_site.devserver.supervisor import StartError

ROOT = Path(__file__).resolve().parents[2]
# A full run that was interrupted less than this time ago is continued.
CONTINUE_SECONDS = 6 * 3600
INTERRUPTED = 130


class Comparison:
    """A run over all rounds and systems. Each measurement is stored when it ends."""

    def __init__(self, sizes: Sizes, systems: list[System], cache: Path) -> None:
        self.sizes, self.systems, self.cache = sizes, systems, cache
        self.started = time.monotonic()
        self.unfinished = cache / "unfinished.json"
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
        """Keep the measurements of a run that was interrupted, if it had the same sizes and systems."""
        if not self.unfinished.is_file() or time.time() - self.unfinished.stat().st_mtime > CONTINUE_SECONDS:
            return
        former = json.loads(self.unfinished.read_text(encoding="utf-8"))
        if all(former[name] == self.results[name] for name in ("cores", "sizes", "systems")):
            self.results |= {name: former[name] for name in ("versions", "measurements")}
            self.say(f"continuing after {len(former['measurements'])} measurements; --fresh starts again")

    def run(self) -> None:
        installed = self._install()
        done = {(entry["round"], entry["system"]) for entry in self.results["measurements"]}
        for round_number in range(1, self.sizes.rounds + 1):
            for system in self.systems:
                if system.key in installed and (round_number, system.key) not in done:
                    self._measure(round_number, system, installed[system.key])
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
                self.cache / "run",
                self.sizes,
                lambda step: self.say(f"{place}: {step}"),
            )
        except MeasurementError as error:
            self._fail(system, f"round {round_number}: {error}", error.detail)
            return
        except StartError as error:
            self._fail(system, f"round {round_number}: its store did not start", str(error))
            return
        shown = [f"{name} {value:,.{1 if value < 100 else 0}f}" for name, value in _flat(figures)]
        self.say(f"{place}: {', '.join(shown)}")
        self.results["versions"][system.key] = versions
        self.results["measurements"].append(
            {"round": round_number, "system": system.key, "load": round(load, 1), "figures": figures}
        )
        self.unfinished.write_text(json.dumps(self.results), encoding="utf-8")

    def _fail(self, system: System, reason: str, detail: str) -> None:
        """Record that a system has no figures. The detail, which may name files and hosts, is only printed."""
        self.say(f"{system.key}: {reason}" + (f"\n{detail}" if detail else ""))
        self.results["failures"][system.name] = reason

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.0f} s] {text}", file=sys.stderr, flush=True)


def _flat(figures: dict[str, dict[str, float]]) -> list[tuple[str, float]]:
    return [(f"{operation} {field}", value) for operation, of in figures.items() for field, value in of.items()]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description="Compare codeQ with other task queues.")
    parser.add_argument("--quick", action="store_true", help="one short round, printed")
    parser.add_argument("--systems", help="keys of systems, separated by commas (default: all)")
    parser.add_argument("--write", action="store_true", help="write the results and the page even after a quick run")
    parser.add_argument("--fresh", action="store_true", help="do not continue an interrupted run")
    parser.add_argument("--cache", type=Path, default=ROOT / ".venv" / "bench", help="directory of the environments")
    arguments = parser.parse_args()
    systems = select_systems(arguments.systems)
    cache = arguments.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _interrupt)
    comparison = Comparison(QUICK if arguments.quick else FULL, systems, cache)
    if not arguments.fresh and not arguments.quick:
        comparison.continue_unfinished()
    try:
        comparison.run()
    except KeyboardInterrupt:
        comparison.say("interrupted; the same command continues a full run")
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
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
