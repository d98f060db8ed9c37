"""How templates write what is not text."""

from __future__ import annotations

from django import template

register = template.Library()


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
