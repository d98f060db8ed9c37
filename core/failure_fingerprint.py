"""What a failure is called: the command and its message without what differs from one occurrence to the next.

The console applies the steps with `re`, Spark with `regexp_replace`; so a pattern may use only what Python's and
Java's regular expressions understand alike: ASCII classes, fixed lookbehinds, no back references, no `\\b`, `\\d` or
`\\s` (both languages have their own idea of them). Every pattern starts at a boundary or has bounded repetition, so
that no message makes it quadratic. tests/core/test_failure_fingerprint.py holds both against each other.
"""

from __future__ import annotations

import re
from typing import Final

LENGTH: Final = 200  # of a normalised message
READ: Final = 4_000  # of a message, from its beginning

# All of a traceback but its last line that is not indented: that line says what happened.
TRACEBACK_HOLDS: Final = "Traceback "
TRACEBACK: Final = r"^[\x00-\x20]{0,100}Traceback [^\x00]*\n(?=[^\x00-\x20])"
# Pattern, what it is replaced by, and what every match of it holds: where that is not, Spark need not look for more.
# The lookaheads in front say nothing new; they are cheaper to fail on than what follows them.
STEPS: Final[tuple[tuple[str, str, str], ...]] = (
    (r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![0-9A-Za-z])", "<uuid>", "-"),
    (r"(?<![0-9A-Za-z])https?://[^\x00-\x20\"'<>]{1,2000}", "<url>", "://"),
    (r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}", "<email>", "@"),
    (
        r"(?<![0-9])[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?"
        r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?",
        "<time>",
        ":",
    ),
    (r"(?<![0-9.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?::[0-9]{1,5})?(?![0-9.])", "<ip>", "."),
    (r"(?=0[xX])(?<![0-9A-Za-z_])0[xX][0-9A-Fa-f]{1,64}", "<hex>", "0"),
    (
        r"(?=[0-9A-Fa-f]{8})(?<![0-9A-Za-z_])(?=[A-Fa-f]{0,64}[0-9])(?=[0-9]{0,64}[A-Fa-f])[0-9A-Fa-f]{8,128}"
        r"(?![0-9A-Za-z_])",
        "<hex>",
        "",
    ),
    (r"(?<![A-Za-z0-9._/<-])(?:/[A-Za-z0-9._-]{1,255}){2,64}", "<path>", "/"),
    # A status or error number is what the failure is; every other number is an occurrence of it.
    (
        r"(?=[0-9])(?<![0-9])(?<![Hh][Tt][Tt][Pp] )(?<![Ss]tatus )(?<![Cc]ode )(?<![Ee]rrno )[0-9]{1,400}",
        "<n>",
        "",
    ),
    (r"<n>(?:[.,:]<n>){1,64}", "<n>", "<n>"),
    # One space alone is what it would become.
    (r"[\x00-\x20]{2,4000}|[\x00-\x1f]", " ", ""),
)
_TRACEBACK = re.compile(TRACEBACK)
_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement, _ in STEPS)
NOTHING_SAID: Final = "(no message)"


def normalise(message: str) -> str:
    """The message as all occurrences of this failure share it."""
    text = _TRACEBACK.sub("", message)[:READ]
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip(" ")[:LENGTH] or NOTHING_SAID


def fingerprint(command: str, message: str) -> str:
    """The name of the group this failure belongs to."""
    return f"{command}: {normalise(message)}"
