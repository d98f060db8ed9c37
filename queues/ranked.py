"""A deprecated alias of `ranked.services`, kept for one release."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    value = getattr(importlib.import_module("ranked.services"), name)
    warnings.warn("queues.ranked has moved: import from ranked.services.", DeprecationWarning, stacklevel=2)
    return value
