"""Pieces that several transforms share."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

FILE = "_file"  # which file of its partition a row goes to, where the rows are already spread by it


def count_where(condition: Column) -> Column:
    return F.count_if(condition)


def sorted_values(value: Column) -> Column:
    """An aggregate: the group's values that are not null, in order. What `at` takes its quantiles from.

    Exact and the same whatever way the rows were spread, which no sketch is; and one pass for all quantiles.
    """
    return F.sort_array(F.collect_list(value))


def at(ordered: Column, share: float) -> Column:
    """The nearest-rank quantile: the least value that at least this share of the values does not exceed."""
    return F.try_element_at(ordered, F.greatest(F.ceil(F.size(ordered) * F.lit(share)), F.lit(1)).cast("int"))


def rounded(value: Column) -> Column:
    """A mean or ratio of exact integers, to three digits: as many as mean anything, and the same on every machine."""
    return F.round(value, 3)


def hour(moment: Column) -> Column:
    return F.date_trunc("hour", moment)


def ms_between(earlier: Column, later: Column) -> Column:
    """Whole milliseconds, the resolution of Redis' clock."""
    return F.unix_millis(later) - F.unix_millis(earlier)


def once(frame: DataFrame, *keys: str, first: tuple[str, ...]) -> DataFrame:
    """One row for each key of a day and tenant: the first one in this order.

    The window is over what the rows are spread by, so that neither it nor the sorting for the files after it needs
    them moved again.
    """
    spread = ["date", "tenant", *(name for name in frame.columns if name == FILE)]
    window = Window.partitionBy(*spread, *keys).orderBy(*first)
    return frame.withColumn("_place", F.row_number().over(window)).where("_place = 1").drop("_place")
