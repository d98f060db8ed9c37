"""What goes wrong: attempts without success by the name of their failure, per tenant, command and day."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline import fingerprint
from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where
from pipeline.spark.transforms.throughput import is_dead


def fingerprinted(command: Column, message: Column) -> Column:
    """`pipeline.fingerprint.fingerprint` said in Spark's own functions, step by step the same."""
    text = F.substring(F.regexp_replace(message, fingerprint.TRACEBACK, ""), 1, fingerprint.READ)
    for pattern, replacement in fingerprint.STEPS:
        text = F.regexp_replace(text, pattern, replacement)
    text = F.substring(F.trim(text), 1, fingerprint.LENGTH)
    return F.concat(command, F.lit(": "), F.when(text == "", fingerprint.NOTHING_SAID).otherwise(text))


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
    named = messages.withColumn("fingerprint", fingerprinted(F.col("command"), F.col("message")))
    return schemas.MARTS["failures"].select(
        named.groupBy("date", "tenant", "command", "fingerprint").agg(
            F.sum("attempts").alias("attempts"),
            F.sum("dead").alias("dead"),
            F.min("first_at").alias("first_at"),
            F.max("last_at").alias("last_at"),
            F.min("example").alias("example"),
        )
    )
