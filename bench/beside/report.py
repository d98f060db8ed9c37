"""The report of a comparison: tables and pictures, from the stored results.

    python -m bench.beside.report      writes the page and the pictures again

The section of docs/reference/performance.md between the markers is replaced; the rest of the page is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from bench.beside.systems import ENQUEUE, ENQUEUE_MANY, LATENCY, SYSTEMS, WORK, System

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = ROOT / "docs" / "reference" / "performance.md"
IMAGES = ROOT / "docs" / "images"
START, END = "<!-- make bench: start -->", "<!-- make bench: end -->"

Results = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One chart of a picture: a bar for each system."""

    title: str
    operation: str
    field: str
    is_lower_better: bool = False


PANELS = (
    Panel("No-op tasks worked off per second", WORK, "per_second"),
    Panel("Tasks enqueued per second, one by one", ENQUEUE, "per_second"),
    Panel("Tasks enqueued per second, in batches of 100", ENQUEUE_MANY, "per_second"),
    Panel("From enqueue to the handler's start, median, ms", LATENCY, "p50_ms", is_lower_better=True),
)
# The first file is shown in the README.
PICTURES = {"beside.svg": PANELS[:2], "beside-all.svg": PANELS}


def values_of(results: Results, system: System, operation: str, field: str) -> list[float]:
    """Return the values of all rounds in which the system was measured."""
    measured = [entry["figures"] for entry in results["measurements"] if entry["system"] == system.key]
    return [figures[operation][field] for figures in measured if operation in figures]


def format_spread(values: list[float], show: Callable[[float], str]) -> str:
    """Return the median, and the lowest and highest value if there are several."""
    if not values:
        return "–"
    if len(values) == 1:
        return show(values[0])
    return f"{show(median(values))} ({show(min(values))}–{show(max(values))})"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(value: float) -> str:
    return f"{value:.1f}"


def build_section(results: Results) -> str:
    """Build the Markdown between the markers."""
    rounds = results["sizes"]["rounds"]
    loads = [entry["load"] for entry in results["measurements"]]
    lines = [
        "## Beside other queues: `make bench`",
        "",
        "![Bar charts of the rates and delays in the table below](../images/beside-all.svg)",
        "",
        f"Measured on {results['date']} with {results['cores']} cores, shared by producer, workers and store, in "
        + (f"{rounds} rounds over all systems in turn" if rounds > 1 else "one short round (`make bench-quick`)")
        + f"; the load average was {min(loads):.1f} to {max(loads):.1f}, which includes the benchmark. "
        + (
            "Each figure is the median, with the lowest and highest in brackets."
            if rounds > 1
            else "The figures are provisional."
        ),
        "",
        "A task has a payload of about 150 bytes, and its handler does nothing. All stores are durable: Valkey with "
        "`appendfsync always`, and the same binary and allocator for all; PostgreSQL with `fsync` and "
        "`synchronous_commit`. In each round, each system starts with an empty store.",
        "",
        f"- *enqueue*: one thread, for {results['sizes']['seconds']:g} s; one call after the other, or calls with 100 "
        "tasks each if the library has such a call.",
        "- *work*: the tasks that were enqueued are worked off, without a producer.",
        "- *delay*: from the call that enqueues to the start of the handler, at 20 tasks a second.",
        "- *CPU*: of all processes together, producer or workers, store and service, per task.",
        "",
        "The rows differ in kind: codeQ is a service, with authentication, tenants and an audit in PostgreSQL behind "
        "HTTP, and all its processes are counted (it writes the audit in the background; only what it writes "
        "within the measured time is counted). The others are libraries whose processes connect to the store directly.",
        "",
        "| | work /s | CPU µs | enqueue one by one /s | CPU µs | in batches /s | CPU µs | delay p50 ms | p99 ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    systems = [system for system in SYSTEMS if system.key in {entry["system"] for entry in results["measurements"]}]
    for system in systems:
        cells = [system.name]
        for operation in (WORK, ENQUEUE, ENQUEUE_MANY):
            cells += [
                format_spread(values_of(results, system, operation, field), _whole)
                for field in ("per_second", "cpu_us")
            ]
        cells += [
            format_spread(values_of(results, system, LATENCY, field), _milliseconds) for field in ("p50_ms", "p99_ms")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | how it runs | versions |", "|---|---|---|"]
    for system in systems:
        versions = ", ".join(f"{name} {version}" for name, version in results["versions"][system.key].items())
        lines.append(f"| {system.name} | {system.description} | {versions} |")
    lines += [""]
    if results["failures"]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in results["failures"].items())
        lines += [f"Not measured, or not in every round: {reasons}", ""]
    lines += [
        "`make bench-quick` prints the same tables from one short round in three minutes. To add a row, add an entry "
        "to `bench/beside/systems.py`, and a program in `bench/beside/drivers` that enqueues and works.",
    ]
    return "\n".join(lines)


def replace_section(text: str, section: str) -> str:
    """Replace the text between the markers. Raises ValueError if they are missing."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START} followed by {END}")
    return f"{before}{START}\n{section}\n{END}{after}"


# A picture has its own background (`card`), so that the text is readable on any page. The colours follow the reader's
# theme.
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de } .bar { fill: #8c959f } .codeq { fill: #0969da }
  text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .spread { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d } .bar { fill: #6e7681 } .codeq { fill: #4493f8 }
    text { fill: #e6edf3 } .spread { stroke: #e6edf3 }
  }"""
NAME_WIDTH, BAR_WIDTH, VALUE_WIDTH, ROW, MARGIN = 132, 210, 58, 20, 16


def build_svg(results: Results, panels: tuple[Panel, ...]) -> str:
    """Draw the panels, two beside each other, as an SVG without scripts and fonts."""
    panel_width = NAME_WIDTH + BAR_WIDTH + VALUE_WIDTH
    drawn = [(panel, _bars(results, panel)) for panel in panels]
    parts: list[str] = []
    top = MARGIN
    for first in range(0, len(drawn), 2):
        pair = drawn[first : first + 2]
        for column, (panel, bars) in enumerate(pair):
            parts += _draw_panel(panel, bars, MARGIN + column * (panel_width + MARGIN), top)
        top += 26 + max(len(bars) for _, bars in pair) * ROW + MARGIN
    width = 2 * panel_width + 3 * MARGIN
    size = f'viewBox="0 0 {width} {top}" width="{width}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = escape("; ".join(panel.title for panel in panels))
    card = f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{top - 1}" rx="6"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}\n</style>", card, *parts, "</svg>"]) + "\n"


def _bars(results: Results, panel: Panel) -> list[tuple[System, list[float]]]:
    bars = [(system, values_of(results, system, panel.operation, panel.field)) for system in SYSTEMS]
    return sorted(
        ((system, values) for system, values in bars if values),
        key=lambda bar: median(bar[1]),
        reverse=not panel.is_lower_better,
    )


def _draw_panel(panel: Panel, bars: list[tuple[System, list[float]]], left: int, top: int) -> list[str]:
    largest = max((max(values) for _, values in bars), default=1.0)
    parts = [f'<text class="title" x="{left}" y="{top + 12}">{escape(panel.title)}</text>']
    x = left + NAME_WIDTH
    for row, (system, values) in enumerate(bars):
        y = top + 26 + row * ROW
        length = max(1.0, median(values) / largest * BAR_WIDTH)
        low, high = (x + value / largest * BAR_WIDTH for value in (min(values), max(values)))
        show = _milliseconds if panel.is_lower_better else _whole
        parts.append(f'<text x="{x - 6}" y="{y + 12}" text-anchor="end">{escape(system.name.replace("`", ""))}</text>')
        kind = "bar codeq" if system.is_codeq else "bar"
        parts.append(f'<rect class="{kind}" x="{x}" y="{y + 2}" width="{length:.1f}" height="{ROW - 7}"/>')
        if len(values) > 1:
            parts.append(f'<path class="spread" d="M{low:.1f} {y + 8.5}H{high:.1f}"/>')
        end = max(x + length, high)
        parts.append(f'<text x="{end + 5:.1f}" y="{y + 12}">{show(median(values))}</text>')
    return parts


def as_text(section: str) -> str:
    """Return the section for a terminal, without the picture and empty lines at the ends."""
    return re.sub(r"^!\[.*\n\n", "", section, flags=re.M).strip()


def write(results: Results, page: Path = PAGE, images: Path = IMAGES) -> list[Path]:
    """Write the page's section and the pictures. Returns the files."""
    page.write_text(replace_section(page.read_text(encoding="utf-8"), build_section(results)), encoding="utf-8")
    for name, panels in PICTURES.items():
        (images / name).write_text(build_svg(results, panels), encoding="utf-8")
    return [page, *(images / name for name in PICTURES)]


def main() -> None:
    for file in write(json.loads(RESULTS.read_text(encoding="utf-8"))):
        print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
