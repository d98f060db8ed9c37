"""The former name of `tenants.cache`, for code that uses ranked queues.

It works for one release and raises a DeprecationWarning.
"""

from __future__ import annotations

import warnings
from typing import Any

from tenants import cache

NEW_NAMES = {"directory": "tenant_cache", "Directory": "TenantCache"}


def __getattr__(name: str) -> Any:
    value = getattr(cache, NEW_NAMES.get(name, name))
    warnings.warn(
        "tenants.directory has moved: import tenant_cache from tenants.cache.", DeprecationWarning, stacklevel=2
    )
    return value
