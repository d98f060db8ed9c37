"""The Spark session of the pipeline: local by default, any master by argument, the same answers everywhere."""

from __future__ import annotations

import logging
import os
import sys

import pyspark.cloudpickle as cloudpickle
from pyspark.sql import SparkSession

import pipeline.spark
from pipeline.spark import java

logger = logging.getLogger(__name__)

# What answers depend on, on every master.
SAME_EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    # A broken file must be an error, not fewer rows.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    # Speculation would run a Python source's read twice at once, for nothing on a snapshot.
    "spark.speculation": "false",
    # Files appear under their final name only when the job as a whole has committed.
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "1",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # To keep the first row of each key it would sort once more before the rows are moved.
    "spark.sql.optimizer.windowGroupLimitThreshold": "-1",
    # The names of partitions are read from the manifest; listing thousands of them needs no job of its own.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "20000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # Nothing secret belongs into a plan or a log.
    "spark.sql.redaction.options.regex": "(?i)url|dsn|password|token",
}
LOCAL = {
    # The default of 200 costs a scheduling round per task and buys nothing on a handful of cores.
    "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 2)),
    "spark.driver.memory": "2g",
    # On few cores a collector that runs beside the work takes a tenth of it.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
    # Lists of a group's values are gathered in a table of groups; with more than 128 of them, Spark's default, it would
    # sort all rows first. A list and its group are a few kilobytes.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
    "spark.ui.enabled": "false",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
}
LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


def is_local(master: str) -> bool:
    return master.startswith("local")


def is_loopback(master: str) -> bool:
    return is_local(master) or master.startswith(("spark://127.0.0.1:", "spark://localhost:"))


def start(master: str | None = None, *, name: str = "codeq", conf: dict[str, str] | None = None) -> SparkSession:
    """The session: this process's one, if it has one already. `conf` wins over what is set here.

    Where `master` is not given, SPARK_MASTER says; where that says nothing, this machine does the work. This is the
    one module of ours beside env.py that reads the environment: it must run without the rest.
    """
    master = master or os.environ.get("SPARK_MASTER") or "local[*]"
    os.environ["JAVA_HOME"] = str(java.home())
    # The workers must be this interpreter, not whichever `python3` comes first on a PATH.
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    if is_loopback(master):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # What runs on executors travels by value, so that a cluster needs our dependencies but not our code.
    cloudpickle.register_pickle_by_value(pipeline.spark)  # type: ignore[no-untyped-call]
    settings = {**SAME_EVERYWHERE, **(LOCAL if is_local(master) else {}), **(LOOPBACK if is_loopback(master) else {})}
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    # It says each connection it opens and closes, some when nothing is left to say it to.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    logger.info("starting Spark on %s", master)
    session = builder.getOrCreate()
    return session
