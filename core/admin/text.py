"""Text for the tables of the admin."""

from __future__ import annotations


def error_summary(error: str, empty: str = "(no message)") -> str:
    """Return the last line of a traceback, or the whole text of any other error."""
    lines = [line for line in error.splitlines() if line.strip()]
    if not lines:
        return empty
    return lines[-1] if lines[0].startswith("Traceback ") else error
