"""How durations spread, in little space: counts in bins, each of which ends 1.41 times as far out as the one before.

Such counts can be added up over any time and still tell a percentile, to within a fifth. They are kept as
[number of the first bin, its count, the next bin's count, …].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

# Bin n holds what took from 2**(n/2) milliseconds to the next bin's start; bin 0 also what took less.
LAST = 63  # half a year
# The same in SQL, of an interval.
SQL = (
    "CASE WHEN {0} IS NOT NULL THEN "
    f"least(greatest(floor(2 * log(2, greatest(extract(epoch FROM {{0}}) * 1000, 1))), 0), {LAST})::int END"
)


def pack(counts: Counter[int]) -> list[int]:
    if not counts:
        return []
    first = min(counts)
    return [first, *(counts[bin] for bin in range(first, max(counts) + 1))]


def add(spreads: Iterable[Sequence[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for spread in spreads:
        for at, count in enumerate(spread[1:], start=spread[0] if spread else 0):
            if count:
                total[at] += count
    return total


def percentile(counts: Counter[int], share: float) -> float | None:
    """The duration in seconds that this share of the attempts did not exceed; None of nothing."""
    left = share * counts.total()
    for at in sorted(counts):
        if counts[at] >= left:
            return float(2 ** ((at + left / counts[at]) / 2) / 1000)
        left -= counts[at]
    return None
