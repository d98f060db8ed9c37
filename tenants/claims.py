"""The former path of `tenants.auth.claims`. It works for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    value = getattr(importlib.import_module("tenants.auth.claims"), name)
    warnings.warn(f"tenants.claims has moved: import {name} from tenants.auth.claims.", FutureWarning, stacklevel=2)
    return value
