"""Script arguments that several commands encode in the same way."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

# Returns a seed for a script's jitter. Redis seeds every script with the same number.
random_seed = partial(random.getrandbits, 31)
# For commands on queues without a policy of their own.
NO_OVERRIDES: Mapping[str, int] = {}


def encode_retention(retention_ms: int, retentions_ms: Mapping[str, int]) -> str | int:
    """Return the script argument `retention_ms`, which lua/lib/retention.lua reads.

    `retentions_ms` maps commands to the retentions that their queues' policies set.
    """
    if not retentions_ms:
        return retention_ms
    return "".join(
        [f"{retention_ms}", *(f" {command}={milliseconds}" for command, milliseconds in retentions_ms.items())]
    )
