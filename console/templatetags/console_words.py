"""How templates write what is not text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from django import template
from django.apps import apps

from console.navigation import NAMES
from core.admin.text import error_summary

register = template.Library()
register.filter("gist", error_summary)


WIDE, HIGH = 120, 28


@register.filter
def spark_line(values: Sequence[int]) -> str:
    """The path of a small curve through these values, oldest first."""
    return f"M{'L'.join(_points(values))}" if values else ""


@register.filter
def spark_area(values: Sequence[int]) -> str:
    """What is below that curve."""
    return f"M0,{HIGH}L{'L'.join(_points(values))}L{WIDE},{HIGH}Z" if values else ""


def _points(values: Sequence[int]) -> list[str]:
    most, step = max([*values, 1]), WIDE / max(len(values) - 1, 1)
    return [f"{at * step:.1f},{HIGH - 2 - (HIGH - 4) * value / most:.1f}" for at, value in enumerate(values)]


@register.filter
def duration(seconds: float | None) -> str:
    """Short and as exact as anybody needs: 12 ms, 3.4 s, 5 min 10 s, 3 h 12 min, 2 d 4 h."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for large, small, names in ((86_400, 3_600, "d h"), (3_600, 60, "h min"), (60, 1, "min s")):
        if seconds >= large:
            whole, rest = divmod(int(seconds), large)
            name, other = names.split()
            return f"{whole} {name} {rest // small} {other}"
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
def moment_ago(milliseconds: int) -> str:
    return ago(datetime.fromtimestamp(milliseconds / 1000, UTC))


@register.filter
def as_in_sidebar(name: object) -> str:
    """A table by the name that the sidebar gives it."""
    ours = {str(apps.get_model(label)._meta.verbose_name_plural): said for label, said in NAMES.items()}
    return ours.get(str(name), str(name))
