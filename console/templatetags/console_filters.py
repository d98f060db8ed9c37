"""Template filters that format numbers, durations, times and small charts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from django import template
from django.apps import apps

from console.navigation import NAMES
from core.admin.text import error_summary

register = template.Library()
register.filter("error_summary", error_summary)


SPARK_WIDTH, SPARK_HEIGHT = 120, 28


@register.filter
def spark_line(values: Sequence[int]) -> str:
    """Return the SVG path of a small line chart of the values, oldest first."""
    return f"M{'L'.join(_points(values))}" if values else ""


@register.filter
def spark_area(values: Sequence[int]) -> str:
    """Return the SVG path of the area below the line of `spark_line`."""
    return f"M0,{SPARK_HEIGHT}L{'L'.join(_points(values))}L{SPARK_WIDTH},{SPARK_HEIGHT}Z" if values else ""


def _points(values: Sequence[int]) -> list[str]:
    highest, step = max([*values, 1]), SPARK_WIDTH / max(len(values) - 1, 1)
    return [
        f"{index * step:.1f},{SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * value / highest:.1f}"
        for index, value in enumerate(values)
    ]


@register.filter
def duration(seconds: float | None) -> str:
    """Format a duration in at most two units: 12 ms, 3.4 s, 5 min, 3 h 12 min, 2 d 4 h."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for large, small, names in ((86_400, 3_600, "d h"), (3_600, 60, "h min"), (60, 1, "min s")):
        if seconds >= large:
            whole, rest = divmod(int(seconds), large)
            large_name, small_name = names.split()
            return f"{whole} {large_name}" + (f" {rest // small} {small_name}" if rest >= small else "")
    raise AssertionError


@register.filter
def milliseconds(value: float | None) -> str:
    return duration(None if value is None else value / 1000)


@register.filter
def thousands(count: int) -> str:
    return f"{count:,}"


@register.filter
def ago(moment: datetime) -> str:
    seconds = (datetime.now(UTC) - moment).total_seconds()
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name} ago"
    return "now" if seconds < 1 else f"{int(seconds)} s ago"


@register.filter
def milliseconds_ago(milliseconds: int) -> str:
    """Format a Unix timestamp in milliseconds as the time since then, such as `5 min ago`."""
    return ago(datetime.fromtimestamp(milliseconds / 1000, UTC))


@register.filter
def sidebar_name(name: object) -> str:
    """Return the sidebar's name for a table. `name` is the plural name of its model."""
    names = {str(apps.get_model(label)._meta.verbose_name_plural): title for label, title in NAMES.items()}
    return names.get(str(name), str(name))
