"""The former path of `core.errors`. It works for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    value = getattr(importlib.import_module("core.errors"), name)
    warnings.warn(f"codeq_site.errors has moved: import {name} from core.errors.", FutureWarning, stacklevel=2)
    return value
