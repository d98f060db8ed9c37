"""Name a failure by its command and the constant parts of its message.

The console applies the steps with `re`, Spark with `regexp_replace`. So a pattern may only use syntax that Python's
and Java's regular expressions interpret alike: ASCII classes, fixed-length lookbehinds, no back references, and no
`\\b`, `\\d` or `\\s`, which the two languages define differently. Every pattern starts at a boundary or has bounded
repetition, so that no message takes quadratic time. tests/pipeline/test_failure_fingerprint.py compares the two.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 200  # characters of a normalised message
MAX_INPUT_LENGTH: Final = 4_000  # characters of a message that are read, after a traceback is removed

# A traceback without its last unindented line. That line is kept, because it names the error.
TRACEBACK: Final = r"^[\x00-\x20]{0,100}Traceback [^\x00]*\n(?=[^\x00-\x20])"
# A text that every match of TRACEBACK contains.
TRACEBACK_REQUIRED: Final = "Traceback "
# Pattern, replacement, and a text that every match contains: Spark skips the pattern on messages without that text.
# The leading lookaheads change no match; they fail faster than the pattern that follows.
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
    # A status or error number identifies the failure. Every other number differs between occurrences.
    (
        r"(?=[0-9])(?<![0-9])(?<![Hh][Tt][Tt][Pp] )(?<![Ss]tatus )(?<![Cc]ode )(?<![Ee]rrno )[0-9]{1,400}",
        "<n>",
        "",
    ),
    (r"<n>(?:[.,:]<n>){1,64}", "<n>", "<n>"),
    # A single space is left out of the pattern because its replacement is a single space.
    (r"[\x00-\x20]{2,4000}|[\x00-\x1f]", " ", ""),
)
_TRACEBACK = re.compile(TRACEBACK)
_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement, _ in STEPS)
NO_MESSAGE: Final = "(no message)"


def normalise(message: str) -> str:
    """Return the part of the message that all occurrences of the failure share."""
    text = _TRACEBACK.sub("", message)[:MAX_INPUT_LENGTH]
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip(" ")[:MAX_LENGTH] or NO_MESSAGE


def fingerprint(command: str, message: str) -> str:
    """Return the name of the group that the failure belongs to."""
    return f"{command}: {normalise(message)}"
