"""Batches of independent items.

An invalid item does not affect the others. Answers are in the order of the items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from core.errors import CodeqError

I = TypeVar("I")  # noqa: E741
T = TypeVar("T")
R = TypeVar("R")


def convert_each(items: Iterable[I], convert: Callable[[I], T]) -> tuple[list[T], dict[int, CodeqError]]:
    """Convert the items. Returns the converted items, and by position the errors of the others."""
    converted: list[T] = []
    refused: dict[int, CodeqError] = {}
    for position, item in enumerate(items):
        try:
            converted.append(convert(item))
        except CodeqError as error:
            refused[position] = error
    return converted, refused


def merge_in_order(by_position: Mapping[int, T], remaining_answers: Sequence[R]) -> list[T | R]:
    """Merge answers with known positions and the ordered answers of all other positions."""
    answers = iter(remaining_answers)
    count = len(by_position) + len(remaining_answers)
    return [by_position[position] if position in by_position else next(answers) for position in range(count)]
