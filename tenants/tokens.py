"""The former path of `tenants.auth.validators`. It works for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    value = getattr(importlib.import_module("tenants.auth.validators"), name)
    warnings.warn(f"tenants.tokens has moved: import {name} from tenants.auth.validators.", FutureWarning, stacklevel=2)
    return value
