"""Histograms of durations with logarithmic bins.

Each bin ends at 1.41 times the end of the previous one. Histograms of different periods can be added. A percentile
from a histogram is in the same bin as the exact one: the error is at most 41 percent, and less than 20 percent if the
durations are spread over several bins. A histogram is stored as [number of the first bin, its count, the next bin's
count, …].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

# Bin n counts durations from 2**(n/2) milliseconds up to the start of the next bin. Bin 0 also counts shorter ones, and
# the last bin longer ones.
LAST_BIN = 63  # from 35 days on
# SQL for the bin of an interval.
BIN_SQL = (
    "CASE WHEN {0} IS NOT NULL THEN "
    f"least(greatest(floor(2 * log(2, greatest(extract(epoch FROM {{0}}) * 1000, 1))), 0), {LAST_BIN})::int END"
)


def pack(counts: Counter[int]) -> list[int]:
    """Return the stored form of the counts by bin."""
    if not counts:
        return []
    first = min(counts)
    return [first, *(counts[bin] for bin in range(first, max(counts) + 1))]


def add(histograms: Iterable[Sequence[int]]) -> Counter[int]:
    """Return the sum of stored histograms, as counts by bin."""
    total: Counter[int] = Counter()
    for packed in histograms:
        for bin, count in enumerate(packed[1:], start=packed[0] if packed else 0):
            if count:
                total[bin] += count
    return total


def percentile(counts: Counter[int], share: float) -> float | None:
    """Return the duration in seconds that this share of the attempts did not exceed.

    Return None if there are no attempts.
    """
    remaining = share * counts.total()
    for bin in sorted(counts):
        if counts[bin] >= remaining:
            return float(2 ** ((bin + remaining / counts[bin]) / 2) / 1000)
        remaining -= counts[bin]
    return None
