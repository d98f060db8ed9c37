"""Unsuccessful attempts, grouped by failure fingerprint, per tenant, command and day."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from core import failure_fingerprint
from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where
from pipeline.spark.transforms.throughput import is_dead


def add_fingerprint(frame: DataFrame) -> DataFrame:
    """Add the column `fingerprint`, computed from `command` and `message`.

    This applies the same steps as `core.failure_fingerprint.fingerprint`, with Spark's own functions. A pattern is only
    tried on messages that contain the text required for a match.
    """
    steps = [(failure_fingerprint.TRACEBACK, "", failure_fingerprint.TRACEBACK_REQUIRED), *failure_fingerprint.STEPS]
    frame = frame.withColumn("_text", F.col("message"))
    for pattern, replacement, required in steps:
        text = F.col("_text")
        replaced = F.regexp_replace(text, pattern, replacement)
        text = F.when(F.contains(text, F.lit(required)), replaced).otherwise(text) if required else replaced
        frame = frame.withColumn(
            "_text", F.substring(text, 1, failure_fingerprint.MAX_INPUT_LENGTH) if replacement == "" else text
        )
    text = F.substring(F.trim("_text"), 1, failure_fingerprint.MAX_LENGTH)
    name = F.when(text == "", failure_fingerprint.NO_MESSAGE).otherwise(text)
    return frame.withColumn("fingerprint", F.concat("command", F.lit(": "), name)).drop("_text")


def failures(attempts: DataFrame) -> DataFrame:
    """Count unsuccessful attempts by fingerprint.

    `example` is one task of the group, the same task in every run. A failure without a message is named after its
    outcome.
    """
    message = F.when(F.coalesce(F.col("error"), F.lit("")) == "", F.col("outcome")).otherwise(F.col("error"))
    counts = (
        F.count("*").alias("attempts"),
        count_where(is_dead()).alias("dead"),
        F.min("ended_at").alias("first_at"),
        F.max("ended_at").alias("last_at"),
        F.min("task_id").alias("example"),
    )
    # Group equal messages first: normalising applies a dozen regular expressions, and most messages are equal.
    messages = (
        attempts.where(F.col("outcome").isin("FAILED", "NACKED", "ABANDONED", "EXPIRED"))
        .groupBy("date", "tenant", "command", message.alias("message"))
        .agg(*counts)
    )
    return schemas.MARTS["failures"].select(
        add_fingerprint(messages)
        .groupBy("date", "tenant", "command", "fingerprint")
        .agg(
            F.sum("attempts").alias("attempts"),
            F.sum("dead").alias("dead"),
            F.min("first_at").alias("first_at"),
            F.max("last_at").alias("last_at"),
            F.min("example").alias("example"),
        )
    )
