"""The rotating Bloom filter and the filters of a process: memory, misses, false positives."""

from __future__ import annotations

import math
import threading

import pytest

from queues.bloom import RotatingFilter
from queues.filters import Filters

ROTATION_SECONDS = 99.0


class Seconds:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 5_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def small(seconds: Seconds) -> RotatingFilter:
    return RotatingFilter(10_000, 0.01, ROTATION_SECONDS, seconds)


@pytest.fixture(scope="module")
def full() -> Filters:
    """The three filters of a process, each with one full generation."""
    filters = Filters()
    for one in (filters.idempotency, filters.deleted, filters.cleanup):
        for n in range(one.capacity):
            one.add(f"acme0001 in {n}")
    return filters


# The sizes that the specification names: bits = -n ln(rate) / ln(2)², twice, for two generations.
SIZES = [
    pytest.param(
        "idempotency", 1_000_000, 0.01, 2.4e6, marks=pytest.mark.spec("BLM-1", "1 M keys at 1 % take ~2.4 MB")
    ),
    pytest.param("deleted", 2_000_000, 1e-12, 28.8e6, marks=pytest.mark.spec("BLM-2", "2 M ids at 1e-12 take ~29 MB")),
    pytest.param("cleanup", 2_000_000, 0.01, 4.8e6, marks=pytest.mark.spec("BLM-3", "2 M ids at 1 % take ~4.8 MB")),
]
RATES = [
    pytest.param(
        "idempotency", 0.01, marks=pytest.mark.spec("BLM-1", "A full filter reports 1 % of unknown keys as known")
    ),
    pytest.param(
        "deleted",
        1e-12,
        marks=pytest.mark.spec("BLM-2", "A full filter does not report any of a million live ids as removed"),
    ),
    pytest.param(
        "cleanup", 0.01, marks=pytest.mark.spec("BLM-3", "A full filter reports 1 % of unknown ids as removed")
    ),
]


@pytest.mark.parametrize(("name", "capacity", "rate", "stated_bytes"), SIZES)
def test_a_filter_has_the_stated_size(name: str, capacity: int, rate: float, stated_bytes: float) -> None:
    one: RotatingFilter = getattr(Filters(), name)
    assert (one.capacity, one.false_positive_rate) == (capacity, rate)
    assert one.size_bytes == pytest.approx(stated_bytes, rel=0.02)
    assert one.size_bytes == pytest.approx(2 * capacity * -math.log(rate) / math.log(2) ** 2 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("name", "rotation_seconds"), [("idempotency", 1_800), ("deleted", 21_600), ("cleanup", 21_600)]
)
def test_a_filter_rotates_as_stated(name: str, rotation_seconds: int) -> None:
    assert getattr(Filters(), name).rotate_seconds == rotation_seconds


@pytest.mark.parametrize(("name", "rate"), RATES)
def test_full_filter_has_at_most_the_stated_false_positives(full: Filters, name: str, rate: float) -> None:
    one: RotatingFilter = getattr(full, name)
    count = 1_000_000
    false_positives = sum(f"acme0001 out {n}" in one for n in range(count))
    # The stated rate plus five standard deviations of a fair sample.
    assert false_positives <= rate * count + 5 * math.sqrt(rate * count)


@pytest.mark.spec("BLM-1", "No key that was added within the rotation is missed")
@pytest.mark.parametrize("name", ["idempotency", "deleted", "cleanup"])
def test_a_full_filter_misses_nothing(full: Filters, name: str) -> None:
    one: RotatingFilter = getattr(full, name)
    assert all(f"acme0001 in {n}" in one for n in range(0, one.capacity, 7))


def test_key_is_known_for_at_least_one_and_at_most_two_rotations(small: RotatingFilter, seconds: Seconds) -> None:
    added: dict[str, float] = {}
    for n in range(400):
        seconds.now += 1.7
        small.add(f"{n}")
        added[f"{n}"] = seconds.now
        young = [key for key, at in added.items() if seconds.now - at < ROTATION_SECONDS]
        old = [key for key, at in added.items() if seconds.now - at >= 2 * ROTATION_SECONDS + 2]
        assert all(key in small for key in young)
        assert sum(key in small for key in old) <= 3 + len(old) / 20  # false positives, as for any unknown key


def test_filter_unused_for_two_rotations_is_empty(small: RotatingFilter, seconds: Seconds) -> None:
    small.add("key")
    seconds.now += 2 * ROTATION_SECONDS
    assert "key" not in small
    small.add("key")
    assert "key" in small


def test_full_generation_accepts_no_key_until_the_next_one(seconds: Seconds) -> None:
    one = RotatingFilter(100, 0.01, ROTATION_SECONDS, seconds)
    for n in range(10_000):
        one.add(f"{n}")
    assert all(f"{n}" in one for n in range(100))
    # The rate of false positives holds for any number of keys: keys beyond the capacity are not added.
    assert sum(f"{n}" in one for n in range(200, 10_000)) < 0.05 * 9_800
    seconds.now += ROTATION_SECONDS
    one.add("late")
    assert "late" in one


def test_adding_a_key_again_does_not_use_capacity(seconds: Seconds) -> None:
    one = RotatingFilter(100, 0.0001, ROTATION_SECONDS, seconds)
    for _ in range(1_000):
        one.add("same")
    for n in range(90):
        one.add(f"{n}")
    assert all(f"{n}" in one for n in range(90))


@pytest.mark.spec("BLM-1", "Threads that add, read and rotate at the same time miss no key")
def test_threads_miss_nothing_while_generations_change(seconds: Seconds) -> None:
    one = RotatingFilter(100_000, 0.01, ROTATION_SECONDS, seconds)
    missed = []

    def use(name: int) -> None:
        for n in range(15_000):  # all six threads together add less than the capacity of a generation
            key, at = f"{name} {n}", seconds.now
            one.add(key)
            is_known = key in one
            # A key may be forgotten only when a whole rotation has passed since it was added.
            if not is_known and seconds.now - at < ROTATION_SECONDS:
                missed.append(key)

    threads = [threading.Thread(target=use, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seconds.now += 33  # whole numbers, so that ages are exact
        threads[0].join(0.0001)
    assert missed == []
