"""Column expressions and filters that several transforms share."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

FILE_COLUMN = "_file"  # the number of the file, within its partition, that a row is written to


def count_where(condition: Column) -> Column:
    return F.count_if(condition)


def collect_sorted(value: Column) -> Column:
    """Aggregate the group's values that are not null into a sorted list, for `quantile`.

    Unlike a sketch, the list gives exact quantiles that do not depend on how the rows are distributed. One list
    serves all quantiles of a column.
    """
    return F.sort_array(F.collect_list(value))


def quantile(ordered: Column, share: float) -> Column:
    """Return the nearest-rank quantile of a sorted list.

    It is the smallest value that at least this share of the values does not exceed.
    """
    return F.try_element_at(ordered, F.greatest(F.ceil(F.size(ordered) * F.lit(share)), F.lit(1)).cast("int"))


def round_ratio(value: Column) -> Column:
    """Round a mean or ratio of integers to three decimal places.

    Further digits are meaningless and may differ between machines.
    """
    return F.round(value, 3)


def truncate_to_hour(time: Column) -> Column:
    return F.date_trunc("hour", time)


def ms_between(earlier: Column, later: Column) -> Column:
    """Return the difference in whole milliseconds, the resolution of the timestamps from Redis."""
    return F.unix_millis(later) - F.unix_millis(earlier)


def keep_first(frame: DataFrame, *keys: str, first: tuple[str, ...]) -> DataFrame:
    """Keep one row for each key of a day and tenant: the first one in the order of `first`.

    The window is partitioned by the columns that the rows are already distributed by. So neither the window nor the
    sorting before the files are written shuffles the rows again.
    """
    distribution = ["date", "tenant", *(name for name in frame.columns if name == FILE_COLUMN)]
    window = Window.partitionBy(*distribution, *keys).orderBy(*first)
    return frame.withColumn("_rank", F.row_number().over(window)).where("_rank = 1").drop("_rank")
