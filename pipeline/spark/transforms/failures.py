"""What goes wrong: attempts without success by the name of their failure, per tenant, command and day."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from core import failure_fingerprint
from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where
from pipeline.spark.transforms.throughput import is_dead


def fingerprinted(frame: DataFrame) -> DataFrame:
    """The frame with `fingerprint`: `core.failure_fingerprint.fingerprint` of its `command` and `message`, said in Spark's
    own functions, step by step the same. A pattern is only tried where what it cannot do without is there."""
    steps = [(failure_fingerprint.TRACEBACK, "", failure_fingerprint.TRACEBACK_HOLDS), *failure_fingerprint.STEPS]
    frame = frame.withColumn("_text", F.col("message"))
    for pattern, replacement, holds in steps:
        text = F.col("_text")
        replaced = F.regexp_replace(text, pattern, replacement)
        text = F.when(F.contains(text, F.lit(holds)), replaced).otherwise(text) if holds else replaced
        frame = frame.withColumn("_text", F.substring(text, 1, failure_fingerprint.READ) if replacement == "" else text)
    text = F.substring(F.trim("_text"), 1, failure_fingerprint.LENGTH)
    said = F.when(text == "", failure_fingerprint.NOTHING_SAID).otherwise(text)
    return frame.withColumn("fingerprint", F.concat("command", F.lit(": "), said)).drop("_text")


def failures(attempts: DataFrame) -> DataFrame:
    """`example` is one task of the group, the same one in every run. A failure without a message is named by its
    outcome."""
    said = F.when(F.coalesce(F.col("error"), F.lit("")) == "", F.col("outcome")).otherwise(F.col("error"))
    counts = (
        F.count("*").alias("attempts"),
        count_where(is_dead()).alias("dead"),
        F.min("ended_at").alias("first_at"),
        F.max("ended_at").alias("last_at"),
        F.min("task_id").alias("example"),
    )
    # Equal messages first: normalising costs a dozen regular expressions, and most messages say the same.
    messages = (
        attempts.where(F.col("outcome").isin("FAILED", "NACKED", "ABANDONED", "EXPIRED"))
        .groupBy("date", "tenant", "command", said.alias("message"))
        .agg(*counts)
    )
    return schemas.MARTS["failures"].select(
        fingerprinted(messages)
        .groupBy("date", "tenant", "command", "fingerprint")
        .agg(
            F.sum("attempts").alias("attempts"),
            F.sum("dead").alias("dead"),
            F.min("first_at").alias("first_at"),
            F.max("last_at").alias("last_at"),
            F.min("example").alias("example"),
        )
    )
